"""Sums of gradients that graphs make in another order than eager does.

Autograd adds the gradients of a tensor one by one, from the last use to the first. A graph adds up those of
its own uses before autograd adds what it gives: (c + (b + a)) where eager has ((c + b) + a). Of outputs that
share memory, a graph gets the sum of their gradients, whenever the views were made.
"""

import operator
from collections.abc import Collection, Sequence
from typing import Any

from torch import fx

from lowtide.capture.graphs import Execution, Trace, output_storages, results_of
from lowtide.capture.tangents import tangent_outputs
from lowtide.facts import Kind
from lowtide.torchside.ops.recurrent_cells import CELLS_BACKWARD

VALUE = "a value that goes from graph to graph"


def summed_otherwise(trace: Trace) -> str:
    """A tensor with a gradient that one graph sums and a later one adds to, in words; empty for none.

    The loss is no graph of the plan: it runs as eager does.
    """
    read_later: set[Any] = set()
    for index in reversed(range(len(trace.executions))):
        execution = trace.executions[index]
        grads = _gradients(execution)
        if index < trace.num_in_model:
            for place, grad in grads.items():
                if _tensor(execution, place) in read_later and _is_sum(grad):
                    origin = execution.segment.origins[place]
                    return VALUE if origin.kind is Kind.OTHER else f"'{origin.name}'"
        read_later.update(_tensor(execution, place) for place in grads)
    return ""


def shares_gradients(trace: Trace, missing: Sequence[Collection[int]]) -> bool:
    """Whether several outputs of the model are parts of one value that the model itself uses, too; `missing`
    are, for each graph, those that get no gradient."""
    for execution, without in zip(trace.executions[: trace.num_in_model], missing, strict=False):
        segment = execution.segment
        if not segment.differentiable:
            continue
        storages = output_storages(segment)
        for tangent, output in tangent_outputs(segment.joint).items():
            is_view = storages.count(storages[output]) > 1
            if is_view and output not in without and any(map(_adds, tangent.users)):
                return True
    return False


def _adds(node: fx.Node) -> bool:
    return bool(node.meta.get("is_gradient_acc"))


def _gradients(execution: Execution) -> dict[int, fx.Node]:
    """By the input whose gradient it is."""
    segment = execution.segment
    if not segment.differentiable:
        return {}
    results = results_of(segment.joint)[segment.num_forward_outputs :]
    return {
        place: grad
        for place, (grad, _) in enumerate(zip(results, segment.origins, strict=False))
        if grad is not None
    }


def _tensor(execution: Execution, place: int) -> Any:
    """What two graphs have in common that read the same tensor."""
    return execution.links.get(place) or execution.segment.origins[place].tensor or (id(execution), place)


def _is_sum(grad: fx.Node) -> bool:
    """Whether autograd would add more than one gradient: of several uses, or of the cells of a layer."""
    if grad.target is operator.getitem and isinstance(grad.args[0], fx.Node):
        return grad.args[0].target is CELLS_BACKWARD
    return _adds(grad)
