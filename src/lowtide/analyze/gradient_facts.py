"""Gradients in the facts of a step: how they reach a graph, and which of them the caller keeps live."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from lowtide.analyze.analysis import Analysis, GraphAnalysis
from lowtide.analyze.backward_facts import is_view_of_gradient
from lowtide.facts import EARLIER, UPDATE, Kind, Region
from lowtide.ops.gradient_terms import is_cast, terms
from lowtide.torch_compat.dispatch import storage_key
from lowtide.torch_compat.dtensor import LEAVES_WHOLE
from lowtide.trace.segments import Execution, Trace


def add_tangent(
    analysis: Analysis,
    state: GraphAnalysis,
    *,
    node: fx.Node,
    output: int,
    executions: list[Execution],
    states: list[GraphAnalysis],
) -> None:
    """Add a tangent: the gradient that the next graph made, or a sum of several, or one made by autograd."""
    givers = [
        (states[later], grad)
        for later in range(state.index + 1, len(executions))
        for primal, place in executions[later].links.items()
        if place == (state.index, output)
        and primal < len(states[later].grads)
        and (grad := states[later].grads[primal]) is not None
    ]
    value = node.meta["val"]
    # autograd adds the gradients of earlier graphs to that of the last one
    summed = [(giver, _first_term(grad)) for giver, grad in givers[-1:]]
    reads = tuple(giver.rank[grad] for giver, grad in summed)
    makes: tuple[int, ...] = ()
    if summed and _is_as(summed[0][1].meta["val"], value):
        holds = summed[0][0].holds[summed[0][1]]
    else:
        nbytes = value.numel() * value.element_size()
        made = analysis.add_storage_of(
            value,
            nbytes=nbytes,
            kind=Kind.OTHER,
            name=state.name(node),
            # a reader may have to copy a gradient whose strides were not traced, and eager's need not; but
            # the user's loss gives another gradient than the sum that stands in for it
            extra_eager_bytes=-nbytes if _copies(analysis, givers) else 0,
            # `loss.backward()` keeps its first gradient live
            pinned=not givers and value.numel() == 1,
        )
        makes = (made,)
        holds = (made, *(held for giver, grad in summed for held in giver.holds[grad]))
    state.holds[node] = holds
    state.storage_of[storage_key(value)] = holds[0]
    state.rank[node] = analysis.add_node(
        name=state.name(node),
        op="placeholder",
        region=Region.BACKWARD,
        segment=state.index,
        reads=reads,
        holds=holds,
        makes=makes,
        fixed="an input of the step",
    )


def _copies(analysis: Analysis, givers: list[tuple[GraphAnalysis, fx.Node]]) -> bool:
    """Whether a graph may copy the gradient that it gets, where eager does not."""
    if len(givers) != 1 or _is_apart(givers[0][1]):
        return False
    return givers[0][0].in_model or not analysis.has_stand_in_loss


def _is_as(grad: Any, value: Tensor) -> bool:
    """Whether a graph takes a gradient with the strides that another graph gives it."""
    return isinstance(grad, Tensor) and grad.stride() == value.stride()


def _first_term(grad: fx.Node) -> fx.Node:
    """The gradient to which autograd adds all others; `grad` itself where it leaves its graph whole."""
    first = grad.args[0] if grad.target is terms else grad
    assert isinstance(first, fx.Node)
    return first


def _is_apart(grad: fx.Node) -> bool:
    """Whether a gradient leaves its graph as the terms of a sum."""
    return isinstance(grad.meta["val"], list)


def add_update(
    analysis: Analysis, state: GraphAnalysis, *, index: int, grad: fx.Node, inside_bytes: Mapping[int, int]
) -> None:
    """Add the optimizer's step for one parameter. It frees the gradient, which eager keeps to the end."""
    origin = state.segment.origins[index]
    storage, *_ = state.holds[grad]
    analysis.storages[storage] = replace(analysis.storages[storage], kind=Kind.GRADIENT, pinned_in_eager=True)
    analysis.gradients[origin.tensor] = storage
    analysis.updated.add(origin.tensor)
    nbytes = inside_bytes[origin.tensor]
    analysis.add_node(
        name=f"step of {origin.name}",
        op=UPDATE,
        region=Region.BACKWARD,
        module=origin.name,
        segment=state.index,
        reads=(state.rank[grad],),
        workspace_bytes=nbytes,
        extra_eager_bytes=-nbytes,
        fixed="the optimizer's step for one parameter",
    )


def add_gradients(analysis: Analysis, state: GraphAnalysis) -> None:
    """Pin what becomes a parameter's `.grad`; autograd copies a gradient whose layout is not dense."""
    end = len(analysis.nodes) - 1
    extra: list[int] = []
    for index, grad in enumerate(state.grads):
        origin = state.segment.origins[index] if index < len(state.segment.origins) else None
        if not isinstance(grad, fx.Node) or origin is None or origin.kind is not Kind.PARAMETER:
            continue
        if origin.tensor in analysis.gradients:
            continue
        first = _first_term(grad)
        value = first.meta["val"]
        owned = analysis.storages[state.holds[first][0]]
        # terms that leave together are all live when autograd adds them up
        alone = not _is_apart(grad) or index in analysis.handed_over[state.index]
        is_whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        dense = LEAVES_WHOLE in first.meta or (alone and is_whole)
        if owned.pinned or owned.static or not dense:
            nbytes = value.numel() * value.element_size()
            made = analysis.add_storage_of(
                value, nbytes=nbytes, kind=Kind.GRADIENT, name=origin.name, pinned=True
            )
            extra.append(made)
            analysis.gradients[origin.tensor] = made
        else:
            analysis.storages[owned.id] = replace(owned, kind=Kind.GRADIENT, pinned=True)
            analysis.gradients[origin.tensor] = owned.id
    analysis.nodes[end] = replace(analysis.nodes[end], makes=tuple(extra), holds=tuple(extra))


def add_first_sums(
    analysis: Analysis, states: Sequence[GraphAnalysis], terms: Sequence[Sequence[tuple[int, fx.Node]]]
) -> None:
    """Count the sums that eager's autograd cannot write over the first gradient, a view. `terms` are the
    first two gradients of each tensor that several graphs use."""
    for (_, first), (index, second) in terms:
        value, rank = first.meta["val"], states[index].rank[second]
        if is_view_of_gradient(first) and analysis.counts(value):
            node = analysis.nodes[rank]
            nbytes = value.numel() * value.element_size()
            analysis.nodes[rank] = replace(node, extra_eager_bytes=node.extra_eager_bytes + nbytes)


def add_earlier_gradients(analysis: Analysis) -> None:
    """Begin the step with gradients of earlier micro-batches; `add_up_gradients` finds their size."""
    made = analysis.add_storage(nbytes=0, kind=Kind.GRADIENT, name=EARLIER)
    analysis.earlier = analysis.add_node(
        name=EARLIER,
        op="placeholder",
        region=Region.FORWARD,
        kind=Kind.GRADIENT,
        holds=(made,),
        makes=(made,),
        fixed="an input of the step",
    )


def add_up_gradients(analysis: Analysis) -> None:
    """Keep the gradients of earlier micro-batches live until the backward pass ends.

    A gradient that is handed over is added to the earlier one where it is made, as in eager, and freed. Other
    gradients leave their graph at its end, where autograd adds them: until then both sums are live.
    """
    if analysis.earlier is None:
        return
    own = dict.fromkeys(analysis.gradients.values())
    (storage,) = analysis.nodes[analysis.earlier].makes
    nbytes = sum(analysis.storages[made].nbytes for made in own)
    late = own.keys() - _leaving(analysis)
    analysis.storages[storage] = replace(analysis.storages[storage], nbytes=nbytes, pinned=True)
    for made in own:
        record = analysis.storages[made]
        extra = -record.nbytes if made in late else 0
        analysis.storages[made] = replace(record, pinned=False, extra_eager_bytes=extra)
    reads = [analysis.earlier]
    for rank, node in enumerate(analysis.nodes):
        inside = sum(analysis.storages[made].nbytes for made in node.makes if made in late)
        if inside:
            reads.append(rank)
            analysis.nodes[rank] = replace(node, extra_eager_bytes=node.extra_eager_bytes + inside)
    last = analysis.nodes[-1]
    analysis.nodes[-1] = replace(last, reads=tuple(dict.fromkeys((*last.reads, *reads))))


def _leaving(analysis: Analysis) -> set[int]:
    """The storages of gradients that leave their graph as soon as they are made."""
    handed = {
        segment.origins[place].tensor
        for segment, places in zip(analysis.segments, analysis.handed_over, strict=True)
        for place in places
    }
    return {storage for tensor, storage in analysis.gradients.items() if tensor in handed}


def keep_earlier_gradients(analysis: Analysis) -> None:
    """Let eager's optimizer read the earlier gradients, to which autograd added all others."""
    if analysis.earlier is not None:
        last = analysis.nodes[-1]
        analysis.nodes[-1] = replace(last, eager_reads=(*last.eager_reads, analysis.earlier))


def keep_live_in_formulas(analysis: Analysis, state: GraphAnalysis, *, only_eager: bool) -> None:
    """Keep the temporaries of an eager autograd formula live to the end of the formula: in the loss always,
    in the model's own graphs where they run without a plan (`only_eager`)."""
    for number, group in itertools.groupby(
        state.segment.backward_ops, key=lambda node: node.meta.get("seq_nr")
    ):
        ranks = [state.rank[node] for node in group if not node.meta.get("is_gradient_acc")]
        if len(ranks) < 2 or number is None:
            continue
        last = analysis.nodes[ranks[-1]]
        # autograd frees saved tensors and the incoming gradient after the formula
        kept = (read for rank in ranks for read in analysis.nodes[rank].reads)
        live = tuple(dict.fromkeys(rank for rank in (*ranks, *kept) if rank != last.rank))
        if only_eager:
            analysis.nodes[last.rank] = replace(last, eager_reads=live)
        else:
            reads = tuple(dict.fromkeys((*last.reads, *live)))
            analysis.nodes[last.rank] = replace(last, reads=reads)


def keep_live_in_calls(analysis: Analysis, state: GraphAnalysis, *, only_eager: bool) -> None:
    """Keep the arguments of a call of torch, and autocast's casts of them, live to the call's last op: in the
    loss always, in the model's own graphs where they run without a plan (`only_eager`).

        kl_div(x, y) under autocast:   cast(x)   cast(y)   xlogy   mul   sub
                                       x, y, cast(x), cast(y) live -------->
    """
    for call, group in itertools.groupby(state.segment.forward_ops, key=_call_of):
        ops = list(group)
        if len(ops) < 2 or call is None:
            continue
        reads = {node: analysis.nodes[state.rank[node]].reads for node in ops}
        own = {state.rank[node] for node in ops}
        given = [rank for node in ops for rank in reads[node] if rank not in own]
        casts = [state.rank[node] for node in ops if is_cast(node) and own.isdisjoint(reads[node])]
        last = analysis.nodes[state.rank[ops[-1]]]
        live = tuple(rank for rank in dict.fromkeys((*given, *casts)) if rank not in (*last.reads, last.rank))
        if only_eager:
            analysis.nodes[last.rank] = replace(last, eager_reads=(*last.eager_reads, *live))
        else:
            analysis.nodes[last.rank] = replace(last, reads=(*last.reads, *live))


def _call_of(node: fx.Node) -> str | None:
    """The call of torch in the user's code that an op is a part of; None where that is unknown."""
    stack: list[tuple[str, Any]] = node.meta.get("source_fn_stack") or []
    return stack[-1][0] if stack else None


def pin_returned(analysis: Analysis, states: list[GraphAnalysis], trace: Trace) -> None:
    """Keep the model's outputs and the loss live to the end of the step, as the caller does."""
    for execution, output in sorted(trace.returned):
        value = states[execution].outputs[output]
        for storage in states[execution].holds[value] if value is not None else ():
            record = analysis.storages[storage]
            if not record.static:
                analysis.storages[storage] = replace(record, pinned=True)
