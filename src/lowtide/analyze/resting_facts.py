"""Which weights and buffers of a step may rest on the store: see `Storage.rests`.

A weight may rest where nobody but captured graphs needs its bytes during a step, and where the user's one
tensor is all that refers to them. It may not where

- its graph runs without a schedule of its own: in the loss, without gradients, or several times a step
- a graph changes it, or returns it (or a view of it), since the user would get another block
- other tensors share its memory, which would then be memory apart
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, fx, nn

from lowtide.analyze.analysis import NO_GRAPH, Analysis
from lowtide.errors import CaptureError
from lowtide.facts import Kind, Region
from lowtide.offload.offload_store import resting_of
from lowtide.ops.schema import writes_inputs
from lowtide.remat.offloaded import SMALLEST_BYTES
from lowtide.torch_compat.dispatch import has_other_owners, storage_key

FROZEN, PARAMETERS = "frozen", "parameters"


def find_resting(
    analysis: Analysis, model: nn.Module, *, num_in_model: int, what: Iterable[str], is_sharded: bool = False
) -> None:
    """Set `rests` of each static storage that may rest, of the kinds `what`."""
    wanted = {FROZEN, PARAMETERS}.intersection(what)
    if not wanted:
        return
    if analysis.device.type != "cpu" or is_sharded:
        where = "is sharded over processes" if is_sharded else f"is on {analysis.device}"
        raise CaptureError(
            f"weights rest on a disk only, for a whole model on the CPU, and this one {where}: leave "
            f"{' and '.join(sorted(wanted))} out of offload_what"
        )
    left_out = _left_out(analysis, num_in_model)
    for tensor in _alone(model):
        storage = analysis.inputs.get(id(tensor))
        word = PARAMETERS if tensor.requires_grad else FROZEN
        if storage is not None and storage not in left_out and word in wanted:
            record = analysis.storages[storage]
            if record.static and record.kind in (Kind.PARAMETER, Kind.BUFFER):
                analysis.storages[storage] = replace(record, rests=word)


def _alone(model: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers that have a dense block of memory to themselves."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
    sharers = Counter(storage_key(t) for t in tensors if t.layout is torch.strided)
    for tensor in tensors:
        is_plain = (
            type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.is_leaf
        )
        if not is_plain or sharers[storage_key(tensor)] > 1:
            continue
        nbytes = tensor.untyped_storage().nbytes()
        is_alone = resting_of(tensor) is not None or not has_other_owners(tensor)
        if nbytes >= SMALLEST_BYTES and nbytes == tensor.nbytes and is_alone:
            yield tensor


def _left_out(analysis: Analysis, num_in_model: int) -> set[int]:
    """Storages that are read outside of planned graphs, changed, or returned."""
    counts = Counter(segment.fingerprint for segment in analysis.segments)
    unplanned = {
        index
        for index, segment in enumerate(analysis.segments)
        if index >= num_in_model or not segment.differentiable or counts[segment.fingerprint] > 1
    }
    found: set[int] = set()
    for node in analysis.nodes:
        place = analysis.graph_nodes.get(node.rank)
        read = {s for rank in node.reads for s in analysis.nodes[rank].holds}
        if node.segment in unplanned or node.segment == NO_GRAPH or node.op == "output":
            found |= {*read, *node.holds}
        elif node.op == "placeholder" or (place is not None and _writes(place.node)):
            found |= read  # of a placeholder: from before a graph break
    for segment in analysis.segments:
        for number in segment.mutated_inputs.values():
            found.add(analysis.inputs.get(segment.origins[number].tensor, -1))
    return found | _unread_forward(analysis)


def _writes(node: fx.Node) -> bool:
    return node.op == "call_function" and writes_inputs(node.target)


def _unread_forward(analysis: Analysis) -> set[int]:
    """Storages that the forward pass does not read, so that it would not fetch them."""
    nodes = analysis.nodes
    inputs = {n.rank for n in nodes if n.op == "placeholder" and n.region is Region.FORWARD}
    read = {
        s
        for node in nodes
        if node.region is Region.FORWARD and node.op not in ("placeholder", "output") and not node.on_demand
        for rank in node.reads
        for s in nodes[rank].holds
    }
    return {s for rank in inputs for s in nodes[rank].holds} - read
