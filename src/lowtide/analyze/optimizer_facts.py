"""The optimizer's step in the facts of a step: its ops after the graphs, whole or in chunks; and the
parameters that it updates in the backward pass, each where its gradient is final."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, fx

from lowtide.analyze.analysis import Analysis
from lowtide.analyze.gradient_facts import keep_earlier_gradients
from lowtide.facts import UPDATE, Kind, Region, Run
from lowtide.ops.calls import Call, target_name
from lowtide.ops.packing import layout_of
from lowtide.ops.schema import short_name
from lowtide.optim.optimizer_trace import OptimizerTrace
from lowtide.optim.resting_step import RESTING_CHUNK_SIZES
from lowtide.optim.split_check import (
    check_split,
    chunked_step_bytes,
    resting_chunk_bytes,
    resting_owners,
    resting_update_bytes,
)
from lowtide.optim.split_step import CHUNK_SIZES
from lowtide.torch_compat.dispatch import storage_key
from lowtide.trace.segments import Segment

SMALL_STEP_BYTES = 16 << 20
"""A step with less workspace is not split."""


def add_optimizer(
    analysis: Analysis, traced: OptimizerTrace, calls: dict[Run, Call], *, chunks: Sequence[tuple[int, int]]
) -> None:
    """Append the optimizer's ops. A temporary stays live as long as the optimizer's Python code refers to it.

    `chunks` are pairs of chunk size and workspace. Where there are any, ops have the workspace of the first,
    smallest size, and the rest as extra bytes of eager.
    """
    if chunks:
        _add_chunked(analysis, traced, calls, chunks[0][1])
        return
    storage: dict[int, int] = {}
    maker: dict[int, int] = {}
    for key, parameter in traced.parameters.items():
        if parameter in analysis.inputs:
            storage[key] = analysis.inputs[parameter]
    for key, parameter in traced.gradients.items():
        storage[key] = analysis.gradients[parameter]
    for position, key in enumerate(traced.state):
        storage[key] = analysis.add_storage(
            nbytes=traced.sizes[key], kind=Kind.OPTIMIZER_STATE, name=f"state_{position}", static=True
        )
    first = len(analysis.nodes)
    for position, op in enumerate(traced.ops):
        name = f"step_{position}.{short_name(op.target)}"
        for key in op.makes:
            storage[key] = analysis.add_storage(nbytes=traced.sizes[key], kind=Kind.OTHER, name=name)
            maker[key] = first + position
        makes = tuple(storage[key] for key in op.makes)
        used = [key for key in (*op.reads, *op.frees) if key in maker and key not in op.makes]
        rank = analysis.add_node(
            name=name,
            op=target_name(op.target),
            region=Region.OPTIMIZER,
            reads=tuple(dict.fromkeys(maker[key] for key in used)),
            holds=makes,
            makes=makes,
            estimated=bool(traced.note),
        )
        if not op.estimated:
            calls[Run(rank)] = Call(op.target, op.args, op.kwargs)
    keep_earlier_gradients(analysis)


def chunks_of_step(
    analysis: Analysis, optimizer: torch.optim.Optimizer, traced: OptimizerTrace
) -> tuple[tuple[int, int], ...]:
    """Chunk sizes of the optimizer's step, smallest first, each with the step's workspace in such chunks.

    `((0, 0),)` where backward takes the whole step. Empty where the step cannot be split, or where chunks do
    not lower the workspace.
    """
    if analysis.updated and set(analysis.gradients) <= analysis.updated:
        return ((0, 0),)
    whole_bytes = traced.peak_bytes
    if traced.note or analysis.updated or whole_bytes <= SMALL_STEP_BYTES:
        return ()
    split = check_split(optimizer)
    if not split.by_parameter:
        return ()
    found: list[tuple[int, int]] = []
    for size, nbytes in sorted(
        chunked_step_bytes(
            optimizer, traced, within_parameters=split.within_parameters, sizes=CHUNK_SIZES
        ).items()
    ):
        if nbytes >= whole_bytes:
            break
        if found and nbytes <= found[-1][1]:  # larger chunks without more workspace
            found.pop()
        found.append((size, nbytes))
    return tuple(found)


def _add_chunked(
    analysis: Analysis, traced: OptimizerTrace, calls: dict[Run, Call], inside_bytes: int
) -> None:
    for position, key in enumerate(traced.state):
        name = f"state_{position}"
        nbytes = traced.sizes[key]
        analysis.add_storage(nbytes=nbytes, kind=Kind.OPTIMIZER_STATE, name=name, static=True)
    live_bytes = 0
    for position, op in enumerate(traced.ops):
        live_bytes += sum(traced.sizes[key] for key in op.makes)
        rank = analysis.add_node(
            name=f"step_{position}.{short_name(op.target)}",
            op=target_name(op.target),
            region=Region.OPTIMIZER,
            workspace_bytes=min(live_bytes, inside_bytes),
            extra_eager_bytes=max(0, live_bytes - inside_bytes),
            estimated=bool(traced.note),
        )
        live_bytes -= sum(traced.sizes[key] for key in op.frees)
        if not op.estimated:
            calls[Run(rank)] = Call(op.target, op.args, op.kwargs)


class StateFacts(NamedTuple):
    """State that may rest on a store: by storage key its parameter, and the `resting_chunks` of the step.
    `updates`: by parameter, the bytes that its update in the backward pass allocates where its state rests,
    and where it rests itself. Parameters by identity."""

    owners: dict[int, int]
    chunks: tuple[tuple[int, int, int], ...] = ()
    updates: Mapping[int, tuple[int, int]] = MappingProxyType({})


def resting_state(analysis: Analysis, optimizer: torch.optim.Optimizer, traced: OptimizerTrace) -> StateFacts:
    """What of the optimizer's state may rest: nothing where its step cannot be split."""
    owners = resting_owners(traced)
    if analysis.updated:
        owners = {key: owner for key, owner in owners.items() if owner in analysis.updated}
    split = check_split(optimizer) if owners and not traced.note else None
    if split is None or not split.by_parameter:
        return StateFacts({})
    within = split.within_parameters
    if analysis.updated:
        of_state, of_both = (
            resting_update_bytes(optimizer, within_parameters=within, weights=weights)
            for weights in (False, True)
        )
        updates = {key: (nbytes, of_both[key]) for key, nbytes in of_state.items()}
        return StateFacts(owners, ((0, 0, 0),), updates)
    state, both = (
        resting_chunk_bytes(
            optimizer, traced, within_parameters=within, sizes=RESTING_CHUNK_SIZES, weights=weights
        )
        for weights in (False, True)
    )
    return StateFacts(owners, tuple((size, state[size], both[size]) for size in sorted(state)))


def mark_resting(
    analysis: Analysis, resting: StateFacts, traced: OptimizerTrace, names: Mapping[int, str]
) -> None:
    """Name the state that may rest, whose storages are the last ones, in the order of the trace."""
    first = next((s.id for s in analysis.storages if s.kind is Kind.OPTIMIZER_STATE), len(analysis.storages))
    inside = {node.module: node.workspace_bytes for node in analysis.nodes if node.op == UPDATE}
    seen: set[str] = set()
    for position, key in enumerate(traced.state):
        name = names.get(resting.owners.get(key, 0))
        if name is None:
            continue
        more_bytes = 0
        if name in inside and name not in seen:
            of_state, of_both = resting.updates[resting.owners[key]]
            more_bytes = of_state - inside[name]
            weight = analysis.inputs.get(resting.owners[key], -1)
            if weight >= 0 and analysis.storages[weight].rests == "parameters":
                analysis.storages[weight] = replace(
                    analysis.storages[weight], update_bytes=of_both - of_state
                )
        seen.add(name)
        analysis.storages[first + position] = replace(
            analysis.storages[first + position], name=name, rests="state", update_bytes=more_bytes
        )


Order = Sequence[tuple[fx.Node, Iterable[fx.Node]]]
"""The ops of a backward pass in order: the value that each makes, and the values that it reads."""


def updatable_inputs(segment: Segment, parameters: Collection[int]) -> dict[int, fx.Node]:
    """Inputs of the graph, among `parameters` (by identity), that can be updated as soon as their gradient is
    final, with this gradient. The gradient must be dense and alone in its storage."""
    if not parameters:
        return {}
    grads = segment.gradients
    results = [node for node in segment.results if node is not None]
    shared = Counter(storage_key(node.meta["val"]) for node in results if _is_tensor(node))
    found = {}
    for index, (grad, origin) in enumerate(zip(grads, segment.origins, strict=False)):
        if grad is None or origin.tensor not in parameters or grad.op != "call_function":
            continue
        value = grad.meta["val"]
        if shared[storage_key(value)] == 1 and layout_of(value) is not None:
            found[index] = grad
    return found


def update_places(segment: Segment, order: Order, grads: dict[int, fx.Node]) -> dict[int, list[int]]:
    """By position in `order`, the inputs to update after it: no later op reads the input or its gradient."""
    if not grads:
        return {}
    inputs = segment.joint.graph.find_nodes(op="placeholder")
    keys = {index: {_key(inputs[index]), _key(grad)} for index, grad in grads.items()}
    wanted = set[int]().union(*keys.values())
    last: dict[int, int] = {}
    for place, (made, reads) in enumerate(order):
        for node in (made, *reads):
            key = _key(node)
            if key in wanted:
                last[key] = place
    places: dict[int, list[int]] = {}
    for index in grads:
        places.setdefault(max(last.get(key, 0) for key in keys[index]), []).append(index)
    return places


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _key(node: fx.Node) -> int:
    return storage_key(node.meta["val"]) if _is_tensor(node) else 0
