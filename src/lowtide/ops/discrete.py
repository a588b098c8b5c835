"""Discrete decisions: indices and masks that are made from floats and choose what the rest of a step reads.

    scores (float) ── topk ── chosen (int) ── index ── rows of the chosen experts

Kernels of an accelerator need not repeat bit for bit. A recomputed score with other low bits can choose
another expert: the recomputed rows then do not fit the kept ones, and shapes can change. So the forward pass
makes every decision once, on all devices: a plan made on the CPU for an accelerator has the same rule. An
order of equal whole numbers (`sort`, without `stable`) is a decision as well. A mask that only selects
elementwise, as of a ReLU or by `where`, is none: another low bit changes one element there. What follows from
a decision by whole numbers alone can be recomputed, and scores can be, since nothing is decided again.
"""

from collections.abc import Iterator

from torch import Tensor, fx

from lowtide.ops.schema import is_backward, short_name
from lowtide.torch_compat.dispatch import iter_tensors

DECIDED_ONCE = "a discrete decision: made once, since a recomputed one could differ"

# fmt: off
DECIDING = {
    "_unique2", "argmax", "argmin", "argsort", "bucketize", "kthvalue", "mode", "multinomial", "searchsorted",
    "sort", "topk", "unique_consecutive", "unique_dim",
}
"""Ops that decide by floats, whoever reads the result."""

AMONG_EQUALS = {"argmax", "argmin", "argsort", "kthvalue", "mode", "sort", "topk"}
"""Ops that decide which of several equal numbers comes first, also by whole numbers."""

CHOOSING = {
    "_embedding_bag", "_grouped_mm", "_local_scalar_dense", "_unsafe_index", "_unsafe_index_put", "bincount",
    "embedding", "gather", "index", "index_add", "index_copy", "index_fill", "index_put", "index_put_",
    "index_reduce", "index_select", "masked_scatter", "masked_select", "nonzero", "nonzero_static", "one_hot",
    "put", "repeat_interleave", "scatter", "scatter_add", "scatter_reduce", "take",
}
"""Ops that choose rows, elements or sizes by an index or a mask."""
# fmt: on


def is_decision(node: fx.Node) -> bool:
    """Whether a forward node makes indices or a mask from floats, which choose what other ops read, or an
    order of equals."""
    if node.op != "call_function" or is_backward(node) or not list(iter_tensors(node.meta.get("val"))):
        return False
    name = short_name(node.target)
    if not _reads_floats(node):
        return name in AMONG_EQUALS and not node.kwargs.get("stable")
    return name in DECIDING or any(_chooses(value) for value in _whole_numbers(node))


def _reads_floats(node: fx.Node) -> bool:
    return any(
        value.is_floating_point()
        for source in node.all_input_nodes
        for value in iter_tensors(source.meta.get("val"))
    )


def _whole_numbers(node: fx.Node) -> Iterator[fx.Node]:
    """The node, or its items, as far as they are integers or truth values."""
    items = node.users if isinstance(node.meta["val"], (list, tuple)) else ()
    for each in (node, *items):
        value = each.meta.get("val")
        if isinstance(value, Tensor) and not _is_float(value):
            yield each


def _chooses(value: fx.Node) -> bool:
    """Whether an op chooses by these integers or truth values, directly or by others made of them. Code
    outside of the graph may choose by those that leave it."""
    stack, seen = [value], {value}
    while stack:
        for user in stack.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if user.op == "output" or short_name(user.target) in CHOOSING:
                return True
            made = user.meta.get("val")
            if isinstance(made, Tensor) and not _is_float(made):
                stack.append(user)
    return False


def _is_float(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()
