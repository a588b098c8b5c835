"""Sums of gradients in eager's order, even where several graphs share a tensor.

Autograd adds the gradients of a tensor one by one, from the last use to the first. A graph that adds up the
gradients of its own uses gives (c + (b + a)) where eager has ((c + b) + a). So the graph returns the terms
where a later graph, or uncaptured code, may use the tensor, too. Autograd then adds all terms one by one.

Eager adds each gradient as soon as it is made, so that one sum and one term are live at a time. So the
gradients of a tensor that several graphs use leave their graph as soon as they are made
(`hand_over_shared`).
"""

import operator
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lowtide.facts import Kind
from lowtide.ops.gradient_terms import (
    adds_gradients,
    dtype_of_cast,
    is_cast,
    is_cast_of_sum,
    is_part,
    return_terms,
    terms,
    terms_of,
)
from lowtide.ops.recurrent_cells import CELLS_BACKWARD
from lowtide.trace.segments import Execution, Segment, Trace, edited
from lowtide.trace.tangents import without_tangents

VALUE = "a value that goes from graph to graph"


def specialised(segment: Segment, *, missing: frozenset[int], apart: Collection[int]) -> Segment:
    """`segment` for a loss that gives no gradient to the outputs `missing`, with the gradients of the inputs
    `apart` as terms; `segment` itself where both are empty."""
    return _with_terms(without_tangents(segment, missing), apart)


def sums_of(segment: Segment) -> dict[int, int]:
    """Inputs of a graph whose gradient is a sum, with the number of its terms."""
    if not segment.differentiable:
        return {}
    grads = segment.gradients
    found = {place: len(terms_of(grad)) for place, grad in enumerate(grads) if grad is not None}
    known = len(segment.origins) == len(grads)  # else AOTAutograd changed the graph's inputs
    return {place: number for place, number in found.items() if number > 1 and known}


def with_terms_apart(trace: Trace, executions: Sequence[Execution]) -> list[Execution]:
    """The executions of a trace; gradients of tensors that may have a later use leave their graph as terms.

    A graph that runs several times has the same terms each time.
    """
    wanted: dict[str, set[int]] = {}
    read_later: set[Any] = set()
    is_unknown = trace.loss_is_uncaptured
    for index in reversed(range(len(executions))):
        execution = executions[index]
        segment = execution.segment
        if execution.apart is not None:
            wanted.setdefault(segment.fingerprint, set()).update(execution.apart)
        elif index < trace.num_in_model:
            wanted.setdefault(segment.fingerprint, set()).update(
                place
                for place in sums_of(segment)
                if is_unknown or _tensor(execution, place) in read_later or is_part(segment.primals[place])
            )
        read_later.update(_tensor(execution, place) for place in _gradients(execution))
        is_unknown = is_unknown or execution.from_uncaptured
    return [
        replace(
            execution,
            apart=frozenset(apart),
            segment=_with_terms(execution.segment, apart),
        )
        for execution in executions
        for apart in [wanted.get(execution.segment.fingerprint, ())]
    ]


def summed_inside_op(trace: Trace) -> str:
    """A tensor, in words, whose gradient one op of a graph sums and a later graph adds to; empty for none.

    The loss does not count: it runs eagerly.
    """
    read_later: set[Any] = set()
    for index in reversed(range(len(trace.executions))):
        execution = trace.executions[index]
        grads = _gradients(execution)
        if index < trace.num_in_model:
            for place, grad in grads.items():
                if _tensor(execution, place) in read_later and _is_sum_inside(grad):
                    origin = execution.segment.origins[place]
                    return VALUE if origin.kind is Kind.OTHER else f"'{origin.name}'"
        read_later.update(_tensor(execution, place) for place in grads)
    return ""


def hand_over_shared(
    trace: Trace, executions: Sequence[Execution], *, adds_to_earlier: bool = False
) -> list[Execution]:
    """The executions of a trace; gradients that autograd adds to others leave their graph one by one.

    Those are the gradients of tensors that several graphs use, and gradients that leave as terms; with
    `adds_to_earlier`, where other calls of the model give gradients as well, those of all parameters that
    autograd passes on at once. A graph that runs several times hands over the same gradients each time.
    """
    uses = Counter(_tensor(execution, place) for execution in executions for place in _gradients(execution))
    wanted: dict[str, set[int]] = {}
    for index, execution in enumerate(executions):
        places = wanted.setdefault(execution.segment.fingerprint, set())
        in_model = index < trace.num_in_model and trace.sharding is None
        if adds_to_earlier and in_model and can_hand_over(execution.segment):
            places.update(_alone_on_their_way(execution.segment))
        if execution.handed_over is not None:
            places.update(execution.handed_over)
        elif in_model and can_hand_over(execution.segment):
            shared = {p for p in _gradients(execution) if uses[_tensor(execution, p)] > 1}
            either = shared.union(execution.apart or ())
            places.update(p for p in either if not is_part(execution.segment.primals[p]))
    return [
        replace(execution, handed_over=frozenset(wanted[execution.segment.fingerprint]))
        for execution in executions
    ]


def first_terms(executions: Sequence[Execution]) -> list[list[tuple[int, fx.Node]]]:
    """For each tensor with several terms in its gradient, the first two in autograd's order, each with the
    number of its graph. A graph that returns a sum has one term."""
    found: dict[Any, list[tuple[int, fx.Node]]] = {}
    for index in reversed(range(len(executions))):
        for place, grad in _gradients(executions[index]).items():
            parts = grad.all_input_nodes if grad.target is terms else [grad]
            found.setdefault(_tensor(executions[index], place), []).extend((index, part) for part in parts)
    return [made[:2] for made in found.values() if len(made) > 1]


def can_hand_over(segment: Segment) -> bool:
    """Whether gradients can leave a graph before its backward pass ends."""
    grads = segment.gradients
    if not segment.differentiable or len(grads) != len(segment.origins):
        return False
    return all(grads[place] is None for place in segment.mutated_inputs.values())


def casts_of(segment: Segment) -> dict[int, torch.dtype]:
    """Weights whose gradient comes from one cast by autocast: position among a graph's inputs, to the dtype
    of the cast."""
    found = {place: dtype_of_cast(weight, grad) for place, weight, grad in _weights(segment)}
    return {place: dtype for place, dtype in found.items() if dtype is not None}


def sums_inside(segment: Segment, apart: Collection[int]) -> tuple[int, ...]:
    """Positions of weights whose gradients the graph itself adds up. The gradient of another call would be
    added to the sum; eager adds term by term."""
    return tuple(place for place, _, grad in _weights(segment) if adds_gradients(grad) and place not in apart)


def _alone_on_their_way(segment: Segment) -> Iterator[int]:
    """Places of the weights whose gradients go from their graph to `.grad` without another node of autograd
    (`runtime.graph_call`), which would run after the whole backward pass of the graph."""
    cast = casts_of(segment)
    return (
        place
        for place, _, grad in _weights(segment)
        if place not in cast and not adds_gradients(grad) and not _is_sum_inside(grad)
    )


def sums_in_casts(segment: Segment) -> str:
    """A weight whose gradient is a sum in the dtype of its cast, whose terms cannot leave the graph, or has
    one term in that dtype beside others; empty for none."""
    for place, _weight, grad in _weights(segment):
        if is_cast_of_sum(grad) or (adds_gradients(grad) and any(map(is_cast, terms_of(grad)))):
            return segment.origins[place].name
    return ""


def _weights(segment: Segment) -> list[tuple[int, fx.Node, fx.Node]]:
    """The trained weights among a graph's inputs: position, input and gradient."""
    grads = segment.gradients
    if not segment.differentiable or len(grads) != len(segment.origins):
        return []
    inputs = segment.joint.graph.find_nodes(op="placeholder")
    return [
        (place, inputs[place], grad)
        for place, (grad, origin) in enumerate(zip(grads, segment.origins, strict=True))
        if grad is not None and origin.kind is Kind.PARAMETER
    ]


def shares_gradients(trace: Trace, missing: Sequence[Collection[int]]) -> bool:
    """Whether several outputs of the model are views of one value that the model itself uses, too; `missing`
    has, for each graph, the outputs without gradient."""
    for execution, without in zip(trace.executions[: trace.num_in_model], missing, strict=False):
        segment = execution.segment
        if not segment.differentiable:
            continue
        storages = segment.output_storages
        for tangent, output in segment.tangents.items():
            is_view = storages.count(storages[output]) > 1
            if is_view and output not in without and any(map(adds_gradients, tangent.users)):
                return True
    return False


def _with_terms(segment: Segment, places: Collection[int]) -> Segment:
    """`segment` with the gradients of the inputs `places` as terms; a copy, unless `places` is empty."""
    if not places:
        return segment
    results = [segment.num_forward_outputs + place for place in sorted(places)]
    return edited(segment, lambda joint: return_terms(joint, results))


def _gradients(execution: Execution) -> dict[int, fx.Node]:
    """Gradients by the position of their input."""
    segment = execution.segment
    if not segment.differentiable:
        return {}
    results = segment.gradients
    return {
        place: grad
        for place, (grad, _) in enumerate(zip(results, segment.origins, strict=False))
        if grad is not None
    }


def _tensor(execution: Execution, place: int) -> Any:
    """A key that is equal for two graphs that read the same tensor."""
    return execution.links.get(place) or execution.segment.origins[place].tensor or (id(execution), place)


def _is_sum_inside(grad: fx.Node) -> bool:
    """Whether one op sums several gradients: those of the cells of a recurrent layer."""
    if grad.target is operator.getitem and isinstance(grad.args[0], fx.Node):
        return grad.args[0].target is CELLS_BACKWARD
    return False
