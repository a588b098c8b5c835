"""Sums of gradients that several graphs make in another order than eager does.

Autograd adds the gradients of a tensor one by one, from the last use to the first. A graph adds up those of
its own uses before autograd adds what it gives: (c + (b + a)) where eager has ((c + b) + a).
"""

import operator
from typing import Any

from torch import fx

from lowtide.capture.graphs import Execution, Trace, results_of
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
    return bool(grad.meta.get("is_gradient_acc"))
