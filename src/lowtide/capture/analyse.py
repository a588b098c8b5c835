"""From captured graphs to the facts of one step: ranks, regions, storages, recipes.

The graphs stay the single source of node identity: `Analysis.places` maps every rank back to its
graph node, and nothing is ever matched by name.
"""

import itertools
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from lowtide.capture import recipes
from lowtide.capture.hooks import OpOverload
from lowtide.capture.origins import device_type, module_path, source_line, target_name
from lowtide.capture.regions import specialise, split
from lowtide.capture.segments import Run, Segment, Trace, mutated_inputs, results_of, storage_key
from lowtide.capture.tangents import stands_for, tangent_outputs
from lowtide.errors import CaptureError
from lowtide.facts import How, Kind, Node, Recipe, Region, Storage
from lowtide.schedules import RANDOM_STATE

OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands in the captured graphs."""

    run: int
    node: fx.Node


@dataclass(slots=True)
class Analysis:
    """Nodes and storages of forward and backward so far, and the graph node behind every rank.

    `gradients[name]` is the storage of a parameter's gradient.
    """

    nodes: list[Node] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    places: dict[int, Place] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    gradients: dict[str, int] = field(default_factory=dict)
    missing: list[frozenset[int]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)

    def add_storage(self, **fields: Any) -> int:
        self.storages.append(Storage(id=len(self.storages), **fields))
        return len(self.storages) - 1

    def add_node(self, **fields: Any) -> int:
        self.nodes.append(Node(rank=len(self.nodes), **fields))
        return len(self.nodes) - 1


class _RunState:
    """What is known of one run while it is analysed: ranks of its nodes, storages of its values."""

    def __init__(self, index: int, segment: Segment) -> None:
        self.index = index
        self.segment = segment
        self.graph = segment.joint.graph
        self.rank: dict[fx.Node, int] = {}
        self.holds: dict[fx.Node, tuple[int, ...]] = {}
        self.storage_of: dict[int, int] = {}
        self.changed: set[int] = set()
        self.random: dict[fx.Node, int] = {}
        results = results_of(segment.joint)
        self.outputs = results[: segment.num_forward_outputs]
        self.grads = results[segment.num_forward_outputs :]
        placeholders = self.graph.find_nodes(op="placeholder")
        tangents = tangent_outputs(segment.joint)
        self.tangents = tangents
        self.primals = [node for node in placeholders if node not in tangents]


def analyse(trace: Trace) -> Analysis:
    """Rank every node of forward and backward, and find the storages they make and read."""
    runs, missing = specialise(trace)
    analysis = Analysis(missing=missing, segments=[run.segment for run in runs])
    states = [_RunState(index, run.segment) for index, run in enumerate(runs)]
    repeated = _repeated(trace)
    for state, run in zip(states, runs, strict=True):
        _forward(analysis, state, run, states, fixed=repeated.get(id(trace.runs[state.index].segment), ""))
    for state in reversed(states):
        _backward(analysis, state, runs, states)
        if state.index >= trace.num_model_runs:
            _hold_within_formulas(analysis, state)
    _pin(analysis, states, trace)
    _classify_activations(analysis)
    return analysis


def _repeated(trace: Trace) -> dict[int, str]:
    counts: dict[int, int] = defaultdict(int)
    for run in trace.runs:
        counts[id(run.segment)] += 1
    reason = "its graph runs several times in one step, between graph breaks"
    fixed = {segment: reason for segment, count in counts.items() if count > 1}
    for run in trace.runs[trace.num_model_runs :]:
        fixed[id(run.segment)] = "part of the loss, which lowtide leaves to you"
    return fixed


def _forward(analysis: Analysis, state: _RunState, run: Run, states: list[_RunState], *, fixed: str) -> None:
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


def _backward(analysis: Analysis, state: _RunState, runs: list[Run], states: list[_RunState]) -> None:
    if not state.segment.differentiable:
        return
    missing = analysis.missing[state.index]
    for node, output in state.tangents.items():
        if output not in missing:
            _add_tangent(analysis, state, node=node, output=output, runs=runs, states=states)
    for node in split(state.segment)[1]:
        _add_op(analysis, state, node, Region.BACKWARD)
    _add_output(analysis, state, state.grads, Region.BACKWARD)
    _add_gradients(analysis, state)


def _hold_within_formulas(analysis: Analysis, state: _RunState) -> None:
    """The loss runs eagerly: what one of autograd's formulas makes on its way lives to the formula's end."""
    for _, group in itertools.groupby(split(state.segment)[1], key=lambda node: node.meta.get("seq_nr")):
        ranks = [state.rank[node] for node in group]
        last = analysis.nodes[ranks[-1]]
        reads = tuple(dict.fromkeys((*last.reads, *ranks[:-1])))
        analysis.nodes[last.rank] = replace(last, reads=reads)


def _add_primal(
    analysis: Analysis,
    state: _RunState,
    *,
    index: int,
    node: fx.Node,
    link: tuple[int, int] | None,
    states: list[_RunState],
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
        if name not in analysis.parameters:
            analysis.parameters[name] = analysis.add_storage(
                nbytes=value.untyped_storage().nbytes(), kind=kind, name=name, static=True
            )
            makes = (analysis.parameters[name],)
        holds = (analysis.parameters[name],)
    if isinstance(value, torch.Tensor) and holds:
        state.storage_of[storage_key(value)] = holds[0]
    state.holds[node] = holds
    state.rank[node] = analysis.add_node(
        name=_node_name(state, node),
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


def _add_tangent(
    analysis: Analysis,
    state: _RunState,
    *,
    node: fx.Node,
    output: int,
    runs: list[Run],
    states: list[_RunState],
) -> None:
    """The gradient of an output arrives: from the next graph as it is, or summed, or made by autograd."""
    givers = [
        (states[later], grad)
        for later in range(state.index + 1, len(runs))
        for primal, place in runs[later].links.items()
        if place == (state.index, output)
        and primal < len(states[later].grads)
        and (grad := states[later].grads[primal]) is not None
    ]
    value = node.meta["val"]
    reads = tuple(giver.rank[grad] for giver, grad in givers)
    makes: tuple[int, ...] = ()
    if len(givers) == 1 and givers[0][1].meta["val"].stride() == value.stride():
        holds = givers[0][0].holds[givers[0][1]]
    else:
        nbytes = value.numel() * value.element_size()
        made = analysis.add_storage(
            nbytes=nbytes,
            kind=Kind.OTHER,
            name=_node_name(state, node),
            # a compiled graph wants its gradients contiguous and copies them; eager reads them as they are
            extra_eager_bytes=-nbytes if len(givers) == 1 else 0,
            # `loss.backward()` itself holds the gradient that it starts from
            pinned=not givers and value.numel() == 1,
        )
        holds = makes = (made,)
    state.holds[node] = holds
    for same in (value, *stands_for(node)):
        state.storage_of[storage_key(same)] = holds[0]
    state.rank[node] = analysis.add_node(
        name=_node_name(state, node),
        op="placeholder",
        region=Region.BACKWARD,
        kind=Kind.OTHER,
        segment=state.index,
        reads=reads,
        holds=holds,
        makes=makes,
        fixed="an input of the step",
    )


def _add_op(analysis: Analysis, state: _RunState, node: fx.Node, region: Region) -> None:
    name = _node_name(state, node)
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


def _add_random_state(analysis: Analysis, state: _RunState, node: fx.Node) -> None:
    """The generator's state before a random op: kept only where a plan replays that op."""
    name = f"{_node_name(state, node)}_random_state"
    nbytes = recipes.random_state_bytes(device_type(node))
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


def _find_changed(state: _RunState, ops: list[fx.Node]) -> None:
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


def _add_recipe(analysis: Analysis, state: _RunState, node: fx.Node, fixed: str) -> None:
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
    inside = recipes.random_state_bytes(device_type(node)) if how is How.REPLAY else 0
    recipe = Recipe(how=how, reads=reads, holds=holds, makes=makes, workspace_bytes=inside)
    analysis.nodes[rank] = replace(record, recipe=recipe)


def _add_output(analysis: Analysis, state: _RunState, values: list[fx.Node | None], region: Region) -> None:
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


def _add_gradients(analysis: Analysis, state: _RunState) -> None:
    """Pin what becomes a parameter's `.grad`; autograd copies a gradient whose layout is not dense."""
    end = len(analysis.nodes) - 1
    extra: list[int] = []
    for index, grad in enumerate(state.grads):
        origin = state.segment.origins[index] if index < len(state.segment.origins) else None
        if not isinstance(grad, fx.Node) or origin is None or origin.kind is not Kind.PARAMETER:
            continue
        value, storages = grad.meta["val"], state.holds[grad]
        owned = analysis.storages[storages[0]]
        dense = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        if origin.name in analysis.gradients:
            continue
        if owned.pinned or owned.static or not dense:
            made = analysis.add_storage(
                nbytes=value.numel() * value.element_size(), kind=Kind.GRADIENT, name=origin.name, pinned=True
            )
            extra.append(made)
            analysis.gradients[origin.name] = made
        else:
            analysis.storages[owned.id] = replace(owned, kind=Kind.GRADIENT, pinned=True)
            analysis.gradients[origin.name] = owned.id
    analysis.nodes[end] = replace(analysis.nodes[end], makes=tuple(extra), holds=tuple(extra))


def _pin(analysis: Analysis, states: list[_RunState], trace: Trace) -> None:
    """The caller holds what the model returned, and the loss, to the end of the step."""
    for run, output in sorted(trace.returned):
        value = states[run].outputs[output]
        for storage in states[run].holds[value] if value is not None else ():
            record = analysis.storages[storage]
            if not record.static:
                analysis.storages[storage] = replace(record, pinned=True)


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


def _node_name(state: _RunState, node: fx.Node) -> str:
    return f"g{state.index}.{node.name}" if state.index else node.name


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
