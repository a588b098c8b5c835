"""From captured graphs to the facts of one step: ranks, regions, storages, remats.

The graphs are the single source of node identity: `Analysis.graph_nodes` maps every rank to its graph node,
and nothing is ever matched by name.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from lowtide.analyze.analysis import Analysis, GraphAnalysis, GraphNode
from lowtide.analyze.backward_facts import (
    BackwardOrder,
    add_chunked_remats,
    backward_order,
    sums_in_place,
)
from lowtide.analyze.gradient_facts import (
    add_earlier_gradients,
    add_first_sums,
    add_gradients,
    add_tangent,
    add_up_gradients,
    add_update,
    keep_live_in_calls,
    keep_live_in_formulas,
    pin_returned,
)
from lowtide.analyze.gradient_sums import first_terms, hand_over_shared, with_terms_apart
from lowtide.analyze.last_outputs import begin_with_last_outputs, free_last_outputs
from lowtide.analyze.optimizer_facts import updatable_inputs, update_places
from lowtide.analyze.own_checkpoints import mark_own_checkpoints
from lowtide.analyze.rounded_graphs import with_rounding
from lowtide.analyze.uncaptured_facts import add_frames, add_uncaptured_bytes, add_uncaptured_code
from lowtide.errors import CaptureError
from lowtide.facts import Action, Kind, Region, Remat
from lowtide.ops.calls import Call, target_name
from lowtide.ops.gradient_terms import terms
from lowtide.ops.loss_chunks import extra_loss_bytes
from lowtide.ops.random_ops import extra_eager_bytes
from lowtide.ops.recurrent import extra_inside_bytes, extra_result_bytes
from lowtide.ops.schema import writes_inputs
from lowtide.remat import Kept, RematRule, fitting_rules
from lowtide.torch_compat import aot_autograd
from lowtide.torch_compat.dispatch import storage_key
from lowtide.trace.failures import refuse_empty_buffers
from lowtide.trace.segments import Execution, Trace
from lowtide.trace.step_device import device_of_trace
from lowtide.trace.tangents import specialise

OUTPUT = "output"


def analyze_graphs(
    trace: Trace,
    *,
    accumulate: bool = False,
    several_calls: bool = False,
    last_output_bytes: int | None = None,
    updates: Mapping[int, int] | None = None,
    offload: bool = False,
    rounds: Iterable[str] = (),
    tensors: Iterable[torch.Tensor] = (),
) -> Analysis:
    """Rank every node of forward and backward, and find the storages they make and read.

    With `accumulate`, gradients of earlier micro-batches are live when the step begins. With `several_calls`,
    the loop calls the model again before the backward pass. The outputs of the
    last step are live until the forward pass ends, and take at least `last_output_bytes`; None where the loop
    has freed them. `updates` are
    parameters (by identity) that are updated in the backward pass, each with the workspace of its update.
    With `offload`, the step has a store for offloaded values. `rounds`: what may run with other bits than
    eager's. `tensors` are the user's own, read by graphs or
    not: the step is on their device, or on that of the graphs' values.
    """
    for execution in trace.executions:
        refuse_empty_buffers(execution.segment)
    executions, missing = specialise(trace)
    executions = with_terms_apart(trace, executions)
    if not updates:  # an update in the backward pass takes its gradient from inside of the graph
        executions = hand_over_shared(trace, executions, adds_to_earlier=accumulate or several_calls)
    executions, rounding, not_rounding = with_rounding(trace, executions, tuple(rounds))
    analysis = Analysis(
        rounding=rounding,
        not_rounding=not_rounding,
        device=device_of_trace(trace, tensors),
        missing=missing,
        has_stand_in_loss=trace.has_stand_in_loss,
        apart=[execution.apart or frozenset() for execution in executions],
        handed_over=[execution.handed_over or frozenset() for execution in executions],
        segments=[execution.segment for execution in executions],
    )
    states = [
        GraphAnalysis(index, execution.segment, in_model=index < trace.num_in_model)
        for index, execution in enumerate(executions)
    ]
    if last_output_bytes is not None:
        begin_with_last_outputs(analysis, states, trace, at_least_bytes=last_output_bytes)
    if accumulate:
        add_earlier_gradients(analysis)
    repeated = _repeated(trace)
    for state, execution in zip(states, executions, strict=True):
        fixed = repeated.get(execution.segment.fingerprint, "")
        _forward(analysis, state, execution, states, fixed=fixed, offload=offload)
        keep_live_in_calls(analysis, state, only_eager=state.in_model)
        if state.in_model:
            add_frames(analysis, state, execution, states)
    for state in reversed(states):
        _backward(analysis, state, executions, states, updates=updates or {})
        keep_live_in_formulas(analysis, state, only_eager=state.in_model)
    add_first_sums(analysis, states, first_terms(executions))
    mark_own_checkpoints(analysis, states)
    add_uncaptured_bytes(analysis, states, trace)
    if trace.uncaptured is not None:
        add_uncaptured_code(analysis, states, trace.uncaptured)
    pin_returned(analysis, states, trace)
    _classify_activations(analysis)
    add_up_gradients(analysis)
    free_last_outputs(analysis, states, trace)
    return analysis


def _repeated(trace: Trace) -> dict[str, str]:
    """Why nothing of a graph can be recomputed, by the graph's fingerprint."""
    counts = Counter(execution.segment.fingerprint for execution in trace.executions)
    reason = "its graph runs several times in one step, between graph breaks"
    fixed = {fingerprint: reason for fingerprint, count in counts.items() if count > 1}
    if trace.sharding is not None:  # equal graphs share one schedule
        fixed = {}
    for execution in trace.executions[trace.num_in_model :]:
        fixed[execution.segment.fingerprint] = "part of the loss, which lowtide leaves to you"
    return fixed


def _forward(
    analysis: Analysis,
    state: GraphAnalysis,
    execution: Execution,
    states: list[GraphAnalysis],
    *,
    fixed: str,
    offload: bool,
) -> None:
    for index, node in enumerate(state.primals):
        link = execution.links.get(index)
        _add_primal(analysis, state, index=index, node=node, link=link, states=states)
    ops = state.segment.forward_ops
    for node in ops:
        fit, reason = ([], fixed) if fixed else fitting_rules(node, offload=offload)
        if reason:
            state.fixed[node] = reason
        kept = [(rule, rule.kept(node)) for rule in fit]
        ranks = {k: _add_kept(analysis, state, node, k) for _, mine in kept for k in mine if k.before}
        _add_op(analysis, state, node, Region.FORWARD)
        ranks |= {k: _add_kept(analysis, state, node, k) for _, mine in kept for k in mine if not k.before}
        state.rules[node] = [(rule, {k: ranks[k] for k in mine}) for rule, mine in kept]
    _find_changed(state, ops)
    for node in ops:
        _add_remats(analysis, state, node)
    _add_output(
        analysis, state, [node for node in state.outputs if isinstance(node, fx.Node)], Region.FORWARD
    )


def _backward(
    analysis: Analysis,
    state: GraphAnalysis,
    executions: list[Execution],
    states: list[GraphAnalysis],
    *,
    updates: Mapping[int, int],
) -> None:
    if not state.segment.differentiable:
        return
    missing, handed_over = analysis.missing[state.index], analysis.handed_over[state.index]
    for node, output in state.tangents.items():
        if output not in missing:
            add_tangent(analysis, state, node=node, output=output, executions=executions, states=states)
    captured = state.segment.backward_ops
    # the loss runs in eager's order, and so do updates in backward
    leaving = {grad for place, grad in enumerate(state.grads) if place in handed_over and grad is not None}
    ops = backward_order(state.segment, leaving) if state.in_model and not updates else captured
    eager_place = {node: 1 + i for i, node in enumerate(captured)} if ops != captured else {}
    order = BackwardOrder(state.segment, ops)
    written_over = order.overwrites() if state.in_model else {}
    eager_sums = sums_in_place(state.segment)
    grads = updatable_inputs(state.segment, updates)
    places = update_places(state.segment, [(node, node.all_input_nodes) for node in ops], grads)
    for place, node in enumerate(ops):
        _add_op(analysis, state, node, Region.BACKWARD, eager_place=eager_place.get(node, 0))
        if node in leaving and node.target is terms:
            _leave_terms(analysis, state.rank[node])
        if node in written_over:
            _write_over(analysis, state.rank[node], written_over[node], in_eager=node in eager_sums)
        elif node in eager_sums and not state.in_model:
            _write_over(analysis, state.rank[node], None, in_eager=True)
        for index in places.get(place, ()):
            add_update(analysis, state, index=index, grad=grads[index], inside_bytes=updates)
    if state.in_model:
        add_chunked_remats(analysis, state, order, written_over)
    live = [grad for index, grad in enumerate(state.grads) if index not in grads and grad not in leaving]
    _add_output(analysis, state, live, Region.BACKWARD)
    add_gradients(analysis, state)


def _add_primal(
    analysis: Analysis,
    state: GraphAnalysis,
    *,
    index: int,
    node: fx.Node,
    link: tuple[int, int] | None,
    states: list[GraphAnalysis],
) -> None:
    origin = state.segment.origins[index] if index < len(state.segment.origins) else None
    kind = origin.kind if origin else Kind.INPUT
    name = origin.name if origin else node.name
    tensor = origin.tensor if origin else 0
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
        known = analysis.inputs.get(tensor) if tensor else None
        if known is None:
            # parameters may share one storage
            known = state.storage_of.get(storage_key(value))
        if known is None:
            known = analysis.add_storage_of(value, kind=kind, name=name, static=True)
            makes = (known,)
        if tensor:
            analysis.inputs[tensor] = known
        holds = (known,)
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


def _add_op(
    analysis: Analysis, state: GraphAnalysis, node: fx.Node, region: Region, *, eager_place: int = 0
) -> None:
    name = state.name(node)
    if aot_autograd.has_inner_graphs(node):
        raise CaptureError(
            f"'{name}' has graphs of its own inside (torch.cond, torch.while_loop), which cannot be planned: "
            "write it with torch.where, or put @torch._dynamo.disable on the function that calls it"
        )
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
            state.storage_of[key] = analysis.add_storage_of(
                tensor,
                kind=Kind.OTHER,
                name=name,
                static=static,
                extra_eager_bytes=extra_eager_bytes(node, tensor) + extra_result_bytes(node, tensor),
            )
            makes.append(state.storage_of[key])
        if state.storage_of[key] not in holds:
            holds.append(state.storage_of[key])
    state.holds[node] = tuple(holds)
    in_chunks = extra_loss_bytes(node)
    state.rank[node] = rank = analysis.add_node(
        name=name,
        op=target_name(node.target),
        region=region,
        **analysis.place_in_code(node),
        segment=state.index,
        reads=tuple(state.rank[source] for source in node.all_input_nodes),
        holds=tuple(holds),
        makes=tuple(makes),
        workspace_bytes=0 if state.in_model else in_chunks,
        extra_eager_bytes=extra_inside_bytes(node) + (in_chunks if state.in_model else 0),
        eager_place=eager_place,
    )
    analysis.graph_nodes[rank] = GraphNode(state.index, node)


def _leave_terms(analysis: Analysis, rank: int) -> None:
    """Let the terms of a sum leave their graph one by one, each as soon as it is made."""
    analysis.nodes[rank] = replace(analysis.nodes[rank], reads=(), holds=())


def _write_over(analysis: Analysis, rank: int, call: Call | None, *, in_eager: bool) -> None:
    """Let the op's result take the storage of the input that it writes over; eager keeps both live, unless
    it writes over the input as well."""
    node = analysis.nodes[rank]
    saved_bytes = sum(analysis.storages[made].nbytes for made in node.makes)
    extra_bytes = node.extra_eager_bytes + (0 if in_eager else saved_bytes)
    analysis.nodes[rank] = replace(node, workspace_bytes=-saved_bytes, extra_eager_bytes=extra_bytes)
    analysis.graph_nodes[rank] = replace(analysis.graph_nodes[rank], call=call)


def _add_kept(analysis: Analysis, state: GraphAnalysis, node: fx.Node, kept: Kept) -> int:
    """Add a tensor that the forward pass keeps for a remat rule, if a plan uses the rule."""
    name = f"{state.name(node)}_{kept.name}"
    made = analysis.add_storage_of(kept.value, kind=Kind.OTHER, name=name)
    rank = analysis.add_node(
        name=name,
        op=kept.name,
        region=Region.FORWARD,
        **analysis.place_in_code(node),
        segment=state.index,
        reads=tuple(state.rank[source] for source in _nodes_in((kept.call.args, kept.call.kwargs))),
        holds=(made,),
        makes=(made,),
        fixed="kept to rematerialize a value",
        on_demand=True,
        movable=kept.begin is not None,
    )
    analysis.kept[rank] = kept
    return rank


def _find_changed(state: GraphAnalysis, ops: Sequence[fx.Node]) -> None:
    """Find storages whose contents the step changes: a recompute must not read them."""
    for index in state.segment.mutated_inputs.values():
        state.changed.update(state.holds[state.primals[index]])
    for node in ops:
        if writes_inputs(node.target):
            for source in node.all_input_nodes:
                state.changed.update(state.holds[source])


def _add_remats(analysis: Analysis, state: GraphAnalysis, node: fx.Node) -> None:
    rank = state.rank[node]
    remats = [_remat(analysis, state, node, rule, kept) for rule, kept in state.rules[node]]
    unchanged = [remat for remat in remats if state.changed.isdisjoint(_relied_on(analysis, remat))]
    fixed = state.fixed.get(node, "") if unchanged or not remats else "reads what the step changes in place"
    analysis.nodes[rank] = replace(analysis.nodes[rank], remats=tuple(unchanged), fixed=fixed)


def _remat(
    analysis: Analysis, state: GraphAnalysis, node: fx.Node, rule: RematRule, kept: dict[Kept, int]
) -> Remat:
    first = analysis.nodes[state.rank[node]]
    call = rule.call(node, tuple(kept))
    makes, holds = rule.blocks(node, makes=first.makes, holds=first.holds)
    return Remat(
        rule=rule.name,
        action=rule.action,
        reads=(*(state.rank[source] for source in _nodes_in((call.args, call.kwargs))), *kept.values()),
        holds=holds,
        makes=makes,
        workspace_bytes=rule.workspace_bytes(node),
    )


def _relied_on(analysis: Analysis, remat: Remat) -> set[int]:
    """Storages that must not change after the op; an offloaded value's own storage, too, since the time of
    its copy is not fixed."""
    read = {s for rank in remat.reads for s in analysis.nodes[rank].holds}
    return read.union(remat.holds) if remat.action is Action.OFFLOAD else read


def _nodes_in(arguments: Any) -> list[fx.Node]:
    """The nodes among a call's arguments, each once, in order."""
    found: dict[fx.Node, None] = {}
    fx.node.map_arg(arguments, found.setdefault)
    return list(found)


def _add_output(
    analysis: Analysis, state: GraphAnalysis, values: list[fx.Node | None], region: Region
) -> None:
    """Add the end of a pass of a graph, until which its results are live."""
    analysis.ends[region, state.index] = analysis.add_node(
        name=f"{OUTPUT}_{region.value}" + (f"_{state.index}" if state.index else ""),
        op=OUTPUT,
        region=region,
        segment=state.index,
        reads=tuple(dict.fromkeys(state.rank[value] for value in values if value)),
        fixed="the end of a graph",
    )


def _classify_activations(analysis: Analysis) -> None:
    """Mark forward storages that backward reads as activations; nodes take the kind of their storages."""
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
