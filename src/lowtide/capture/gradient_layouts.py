"""Gradients that reach a graph laid out otherwise than torch took for granted when it traced the graph.

AOTAutograd traces a backward pass before it knows the gradients: it takes each to be laid out like the output
that it belongs to, and copies it into that layout where it is not. Eager PyTorch goes on with the gradient as
it is, and some kernels sum in another order then.
"""

from collections.abc import Sequence

from lowtide.capture.graphs import Trace, results_of
from lowtide.capture.tangents import tangent_outputs

LAID_OUT_OTHERWISE = (
    "the gradient of an output of the model arrives with its dimensions in another order in memory than the "
    "output has (channels last, a transposed result): torch copies it into the output's order first, eager "
    "goes on with it as it is, so that the last bits can differ. lowtide.verify says whether they do; return "
    "the output `.contiguous()`, or compute the loss in the model's forward, to be exact"
)


def in_another_order(shape: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two tensors of one shape are laid out in another order of their dimensions. A gradient that was
    expanded has the same number everywhere, in any order."""
    dims = [dim for dim, size in enumerate(shape) if size > 1 and strides[dim] and others[dim]]
    return sorted(dims, key=lambda dim: -strides[dim]) != sorted(dims, key=lambda dim: -others[dim])


def laid_out_otherwise(trace: Trace) -> bool:
    """Whether a gradient goes from one graph of a step to another in an order that was not traced."""
    made = {
        (number, output): tangent.meta["val"]
        for number, execution in enumerate(trace.executions[: trace.num_in_model])
        if execution.segment.differentiable
        for tangent, output in tangent_outputs(execution.segment.joint).items()
    }
    for execution in trace.executions:
        segment = execution.segment
        if not segment.differentiable:
            continue
        grads = results_of(segment.joint)[segment.num_forward_outputs :]
        for place, source in execution.links.items():
            grad = grads[place] if place < len(grads) else None
            if grad is None or source not in made:
                continue
            seen, taken = grad.meta["val"], made[source]
            if seen.shape == taken.shape and in_another_order(seen.shape, seen.stride(), taken.stride()):
                return True
    return False
