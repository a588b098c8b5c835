"""From captured graphs to the facts of one step: ranks, regions, storages, recipes.

The graphs stay the single source of node identity: `Analysis.places` maps every rank back to its
graph node, and nothing is ever matched by name.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from lowtide.capture import recipes
from lowtide.capture.gradients import add_gradients, add_tangent, hold_within_formulas, pin_returned
from lowtide.capture.names import device_name, module_path, source_line, target_name
from lowtide.capture.records import Analysis, Place, RunState
from lowtide.capture.regions import specialise, split
from lowtide.capture.tangents import stands_for
from lowtide.capture.trace import Run, Trace, mutated_inputs, storage_key
from lowtide.errors import CaptureError
from lowtide.facts import How, Kind, Recipe, Region
from lowtide.planning.schedules import RANDOM_STATE
from lowtide.torchside.hooks import OpOverload

OUTPUT = "output"


def analyse(trace: Trace) -> Analysis:
    """Rank every node of forward and backward, and find the storages they make and read."""
    runs, missing = specialise(trace)
    analysis = Analysis(missing=missing, segments=[run.segment for run in runs])
    states = [RunState(index, run.segment) for index, run in enumerate(runs)]
    repeated = _repeated(trace)
    for state, run in zip(states, runs, strict=True):
        _forward(analysis, state, run, states, fixed=repeated.get(run.segment.fingerprint, ""))
    for state in reversed(states):
        _backward(analysis, state, runs, states)
        if state.index >= trace.num_model_runs:
            hold_within_formulas(analysis, state)
    pin_returned(analysis, states, trace)
    _classify_activations(analysis)
    return analysis


def _repeated(trace: Trace) -> dict[str, str]:
    """Why nothing of a graph can be run again, by its fingerprint."""
    counts = Counter(run.segment.fingerprint for run in trace.runs)
    reason = "its graph runs several times in one step, between graph breaks"
    fixed = {fingerprint: reason for fingerprint, count in counts.items() if count > 1}
    for run in trace.runs[trace.num_model_runs :]:
        fixed[run.segment.fingerprint] = "part of the loss, which lowtide leaves to you"
    return fixed


def _forward(analysis: Analysis, state: RunState, run: Run, states: list[RunState], *, fixed: str) -> None:
    for index, node in enumerate(state.primals):
        _add_primal(analysis, state, index=index, node=node, link=run.links.get(index), states=states)
    ops = split(state.segment)[0]
    for node in ops:
        if recipes.is_random(node):
            _add_random_state(analysis, state, node)
        _add_op(analysis, state, node, Region.FORWARD)
    _find_changed(state, ops)
    for node in ops:
        _add_recipe(analysis, state, node, fixed)
    _add_output(
        analysis, state, [node for node in state.outputs if isinstance(node, fx.Node)], Region.FORWARD
    )


def _backward(analysis: Analysis, state: RunState, runs: list[Run], states: list[RunState]) -> None:
    if not state.segment.differentiable:
        return
    missing = analysis.missing[state.index]
    for node, output in state.tangents.items():
        if output not in missing:
            add_tangent(analysis, state, node=node, output=output, runs=runs, states=states)
    for node in split(state.segment)[1]:
        _add_op(analysis, state, node, Region.BACKWARD)
    _add_output(analysis, state, state.grads, Region.BACKWARD)
    add_gradients(analysis, state)


def _add_primal(
    analysis: Analysis,
    state: RunState,
    *,
    index: int,
    node: fx.Node,
    link: tuple[int, int] | None,
    states: list[RunState],
) -> None:
    origin = state.segment.origins[index] if index < len(state.segment.origins) else None
    kind = origin.kind if origin else Kind.INPUT
    name = origin.name if origin else node.name
    value = node.meta.get("val")
    holds: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    if link is not None:
        source = states[link[0]].outputs[link[1]]
        assert source is not None
        holds, reads = states[link[0]].holds[source], (states[link[0]].rank[source],)
        kind = Kind.OTHER
    elif isinstance(value, torch.Tensor):
        if name not in analysis.parameters and storage_key(value) in state.storage_of:
            # parameters that are parts of one storage
            analysis.parameters[name] = state.storage_of[storage_key(value)]
        elif name not in analysis.parameters:
            analysis.parameters[name] = analysis.add_storage(
                nbytes=value.untyped_storage().nbytes(), kind=kind, name=name, static=True
            )
            makes = (analysis.parameters[name],)
        holds = (analysis.parameters[name],)
    if isinstance(value, torch.Tensor) and holds:
        state.storage_of[storage_key(value)] = holds[0]
    state.holds[node] = holds
    state.rank[node] = analysis.add_node(
        name=state.name(node),
        op="placeholder",
        region=Region.FORWARD,
        kind=kind,
        module=name,
        segment=state.index,
        reads=reads,
        holds=holds,
        makes=makes,
        fixed="comes from before a graph break" if link is not None else "an input of the step",
    )


def _add_op(analysis: Analysis, state: RunState, node: fx.Node, region: Region) -> None:
    name = state.name(node)
    static = node.op == "get_attr"
    makes: list[int] = []
    holds: list[int] = []
    for tensor in _tensors(node.meta.get("val")):
        if tensor.layout is not torch.strided:
            raise CaptureError(
                f"'{name}' makes a tensor of layout {tensor.layout}, and only dense ones can be planned: "
                "leave sparse gradients out, such as those of nn.Embedding(sparse=True)"
            )
        key = storage_key(tensor)
        if key not in state.storage_of:
            state.storage_of[key] = analysis.add_storage(
                nbytes=tensor.untyped_storage().nbytes(),
                kind=Kind.OTHER,
                name=name,
                static=static,
                extra_eager_bytes=_extra_eager_bytes(node, tensor),
            )
            makes.append(state.storage_of[key])
        if state.storage_of[key] not in holds:
            holds.append(state.storage_of[key])
    for same in stands_for(node):
        state.storage_of[storage_key(same)] = holds[0]
    state.holds[node] = tuple(holds)
    state.rank[node] = rank = analysis.add_node(
        name=name,
        op=target_name(node.target),
        region=region,
        kind=Kind.OTHER,
        module=module_path(node),
        source=source_line(node),
        segment=state.index,
        reads=tuple(state.rank[source] for source in node.all_input_nodes),
        holds=tuple(holds),
        makes=tuple(makes),
    )
    analysis.places[rank] = Place(state.index, node)


def _add_random_state(analysis: Analysis, state: RunState, node: fx.Node) -> None:
    """The generator's state before a random op: kept only where a plan replays that op."""
    name = f"{state.name(node)}_random_state"
    nbytes = recipes.random_state_bytes(device_name(node))
    made = analysis.add_storage(nbytes=nbytes, kind=Kind.OTHER, name=name)
    state.random[node] = analysis.add_node(
        name=name,
        op=RANDOM_STATE,
        region=Region.FORWARD,
        kind=Kind.OTHER,
        module=module_path(node),
        segment=state.index,
        holds=(made,),
        makes=(made,),
        fixed="the generator's state before a random op",
    )


def _find_changed(state: RunState, ops: list[fx.Node]) -> None:
    """Storages whose contents are not the same after the forward pass: a recompute must not read them."""
    for index in mutated_inputs(state.segment.joint).values():
        state.changed.update(state.holds[state.primals[index]])
    for node in ops:
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            for source in node.all_input_nodes:
                state.changed.update(state.holds[source])


def _extra_eager_bytes(node: fx.Node, made: torch.Tensor) -> int:
    """Eager dropout on CPU keeps a mask of its input's type, the captured op one of bytes."""
    if node.target is not recipes.eager_dropout or made.dtype is not torch.bool:
        return 0
    return made.numel() * (int(node.meta["val"][0].element_size()) - 1)


def _add_recipe(analysis: Analysis, state: RunState, node: fx.Node, fixed: str) -> None:
    rank = state.rank[node]
    record = analysis.nodes[rank]
    reason = fixed or recipes.reason_fixed(node)
    if reason:
        analysis.nodes[rank] = replace(record, fixed=reason)
        return
    how = recipes.how_again(node)
    reads, makes = record.reads, record.makes
    if how is How.MASK:
        pair = recipes.dropout_output(node)
        assert pair is not None
        reads, makes = tuple(state.rank[source] for source in pair), record.holds
    elif how is How.REPLAY:
        reads = (*reads, state.random[node])
    elif how is How.NO_STATS:
        makes = record.makes[:3]
        used = recipes.without_statistics(node)[1]
        reads = tuple(state.rank[source] for source in used if isinstance(source, fx.Node))
    if any(storage in state.changed for read in reads for storage in analysis.nodes[read].holds):
        analysis.nodes[rank] = replace(record, fixed="reads what the step changes in place")
        return
    holds = makes if how in (How.MASK, How.NO_STATS) else record.holds
    inside = recipes.random_state_bytes(device_name(node)) if how is How.REPLAY else 0
    recipe = Recipe(how=how, reads=reads, holds=holds, makes=makes, workspace_bytes=inside)
    analysis.nodes[rank] = replace(record, recipe=recipe)


def _add_output(analysis: Analysis, state: RunState, values: list[fx.Node | None], region: Region) -> None:
    """The end of a graph: what it returns lives at least until here."""
    analysis.add_node(
        name=f"{OUTPUT}_{region.value}" + (f"_{state.index}" if state.index else ""),
        op=OUTPUT,
        region=region,
        kind=Kind.OTHER,
        segment=state.index,
        reads=tuple(dict.fromkeys(state.rank[value] for value in values if value)),
        fixed="the end of a graph",
    )


def _classify_activations(analysis: Analysis) -> None:
    """A forward storage that backward reads is an activation; nodes take the kind of what they make."""
    forward = {s for node in analysis.nodes if node.region is Region.FORWARD for s in node.makes}
    for node in analysis.nodes:
        if node.region is not Region.BACKWARD:
            continue
        for source in node.reads:
            if analysis.nodes[source].region is not Region.FORWARD:
                continue
            for storage in analysis.nodes[source].holds:
                record = analysis.storages[storage]
                if storage in forward and not record.static:
                    analysis.storages[storage] = replace(record, kind=Kind.ACTIVATION)
    for rank, node in enumerate(analysis.nodes):
        if node.holds:
            kinds = [analysis.storages[s].kind for s in (node.makes or node.holds)]
            analysis.nodes[rank] = replace(
                node, kind=next((k for k in kinds if k is not Kind.OTHER), kinds[0])
            )


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
