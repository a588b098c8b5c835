"""The gradient of a cross entropy with probabilities for targets, row by row.

There the gradient of the log-probabilities is a product: of the gradient of the loss, the targets and, where
there are any, the weights of the classes. Each of its rows needs that row of the factors alone.
"""

from typing import Any

import torch
from torch import Tensor, fx

from lowtide.torchside.hooks import FakeTensor, graph_is_kept
from lowtide.torchside.ops.loss_rows import loss_gradient, rows_at_a_time
from lowtide.torchside.ops.readers import is_backward

aten = torch.ops.aten


def soft_loss_gradient(
    grad: Tensor,
    factors: list[Tensor],
    scores: Tensor,
    dim: int,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
    slice_bytes: int | None = None,
) -> Tensor:
    """What `_log_softmax_backward_data` gives for the product of `grad` and the `factors`, one after the
    other; `scores` are the log-probabilities. `out` and `slice_bytes` as for `loss_gradient`."""
    if isinstance(scores, FakeTensor):
        return torch.empty_like(scores) if out is None else out
    if out is None or graph_is_kept():
        out = torch.empty_like(scores)
    step = rows_at_a_time(scores, slice_bytes)
    for first in range(0, len(scores), step):
        rows = slice(first, first + step)
        some = grad[rows]
        for factor in factors:
            has_rows = factor.dim() == scores.dim() and len(factor) == len(scores)
            some = torch.mul(some, factor[rows] if has_rows else factor)
        aten._log_softmax_backward_data.out(some, scores[rows], dim, dtype, out=out[rows])
        del some  # or two of them would be there at once
    return out


LOSS_GRADIENTS = (loss_gradient, soft_loss_gradient)
"""Ops that are one in slices and several in eager."""


def extra_loss_bytes(node: fx.Node) -> int:
    """What eager holds between the two ops beyond one slice of it."""
    if node.target not in LOSS_GRADIENTS:
        return 0
    value = node.meta["val"]
    return int(value.nbytes - rows_at_a_time(value) * value[0].nbytes)


def use_soft_loss_rows(graph: fx.Graph) -> None:
    """Let such a gradient be made in slices of rows; preserves every bit."""
    softmax_backward = aten._log_softmax_backward_data.default
    for softmax in graph.find_nodes(op="call_function", target=softmax_backward):
        found = _product(softmax)
        if found is None:
            continue
        products, grad, factors = found
        softmax.target = soft_loss_gradient
        softmax.args = (grad, factors, *softmax.args[1:])
        for node in products:
            graph.erase_node(node)


def _product(softmax: fx.Node) -> tuple[list[fx.Node], fx.Node, list[fx.Node]] | None:
    """The products that lead to a log-softmax's gradient, the last first, what the first of them begins with,
    and what is multiplied with then, in that order."""
    value, scores = softmax.meta["val"], softmax.args[1]
    if not isinstance(scores, fx.Node) or not _fits(softmax, value, scores.meta["val"]):
        return None
    products: list[fx.Node] = []
    factors: list[fx.Node] = []
    grad: Any = softmax.args[0]
    while _is_product(grad, value):
        one, other = grad.args
        if not _goes_on(one, value):
            one, other = other, one
        if not _goes_on(one, value):
            break
        products.append(grad)
        factors.insert(0, other)
        grad = one
    return (products, grad, factors) if products else None


def _fits(softmax: fx.Node, value: Tensor, scores: Tensor) -> bool:
    is_over_classes = value.dim() > 1 and softmax.args[2] in (1, 1 - value.dim())
    lies = bool(value.numel()) and value.is_contiguous() and scores.is_contiguous()
    return is_over_classes and lies and softmax.args[3] is value.dtype


def _is_product(node: Any, like: Tensor) -> bool:
    if not isinstance(node, fx.Node) or node.target is not aten.mul.Tensor or len(node.users) != 1:
        return False
    sources = [arg.meta["val"] if isinstance(arg, fx.Node) else None for arg in node.args]
    is_like = node.meta["val"].shape == like.shape and not node.kwargs and is_backward(node)
    return is_like and all(isinstance(s, Tensor) and s.dtype is like.dtype and s.dim() for s in sources)


def _goes_on(node: Any, like: Tensor) -> bool:
    """Whether the gradient of the loss comes along here."""
    return isinstance(node, fx.Node) and is_backward(node) and node.meta["val"].shape == like.shape
