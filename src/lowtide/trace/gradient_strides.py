"""Gradients that reach a graph laid out otherwise than torch took for granted when it traced the graph."""

from lowtide.torch_compat.aot_autograd import in_another_order, order_of
from lowtide.trace.segments import Trace, results_of
from lowtide.trace.split import tangent_outputs

LAID_OUT_OTHERWISE = (
    "the gradient of an output of the model arrives with its dimensions in another order in memory than the "
    "output has (channels last, a transposed result)"
)


def seen_orders(trace: Trace) -> dict[str, set[str]]:
    """By the order that was traced, those in which gradients go from one graph of a step to another."""
    made = {
        (number, output): tangent.meta["val"]
        for number, execution in enumerate(trace.executions[: trace.num_in_model])
        if execution.segment.differentiable
        for tangent, output in tangent_outputs(execution.segment.joint).items()
    }
    seen: dict[str, set[str]] = {}
    for execution in trace.executions:
        segment = execution.segment
        grads = results_of(segment.joint)[segment.num_forward_outputs :] if segment.differentiable else []
        for place, source in execution.links.items():
            grad = grads[place] if place < len(grads) else None
            if grad is None or source not in made or made[source].shape != grad.meta["val"].shape:
                continue
            taken, found = made[source], grad.meta["val"]
            is_other = in_another_order(taken.shape, taken.stride(), found.stride())
            order = order_of(found if is_other else taken)
            seen.setdefault(order_of(taken), set()).add(order)
    return seen


def new_orders(trace: Trace) -> dict[str, str]:
    """The orders to trace a step for, where one rule holds for all outputs that are laid out alike."""
    return {
        taken: next(iter(found))
        for taken, found in seen_orders(trace).items()
        if len(found) == 1 and found != {taken}
    }


def laid_out_otherwise(trace: Trace) -> bool:
    """Whether a gradient goes from one graph of a step to another in an order that was not traced."""
    return any(found != {taken} for taken, found in seen_orders(trace).items())
