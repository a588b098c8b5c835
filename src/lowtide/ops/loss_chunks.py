"""Cross entropy in chunks of rows: the gradients of its logits, and log-probabilities in the logits' memory.

Each row of a log-softmax, and of its gradient, needs only that row of its inputs. So chunks of rows give the
same bits as all rows at once, without a whole tensor of the logits' size between two ops:

    loss backward -> add -> log-softmax backward        ==>   loss_gradient         targets are classes
    grad * targets * weights -> log-softmax backward    ==>   soft_loss_gradient    targets are probabilities
    product -> view -> log-softmax                      ==>   log_probabilities     written over the product
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.ops import chunk_sizes
from lowtide.ops.live_ranges import storages_of
from lowtide.ops.schema import is_backward, is_view_op
from lowtide.torch_compat.autograd_engine import graph_is_kept
from lowtide.torch_compat.dispatch import FakeTensor, iter_tensors

aten = torch.ops.aten

CHUNK_BYTES = 1 << 20
"""The most bytes of a chunk on the CPU, unless a single row has more."""
LARGE_CHUNK_BYTES = 8 << 20
FEWEST_CHUNKS = 16

LOSSES = {aten.nll_loss_backward.default: 2, aten.nll_loss2d_backward.default: 4}
"""Backward ops of losses, and the number of dimensions of their logits; the first dimension is the rows."""


def loss_gradient(  # noqa: PLR0917 - what the two ops of torch take
    grad: Tensor,
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
    dim: int,
    dtype: torch.dtype,
    plus: Tensor | None = None,
    *,
    out: Tensor | None = None,
    chunk_bytes: int | None = None,
) -> Tensor:
    """`_log_softmax_backward_data` after `nll_loss_backward`, for the log-probabilities `scores`.

    `plus` is added in between, as the gradient of label smoothing is. `out`, `chunk_bytes`: see `_by_rows`.
    """
    backward = aten.nll_loss_backward if scores.dim() == 2 else aten.nll_loss2d_backward

    def gradient(rows: slice) -> Tensor:
        images = scores[rows].unsqueeze(2) if scores.dim() == 3 else scores[rows]  # a sequence is one row
        own = grad[rows] if grad.dim() else grad
        made = backward(own, images, target[rows], weight, reduction, ignore_index, total_weight)
        some: Tensor = made.view_as(scores[rows])
        return some if plus is None else some.add_(plus[rows])

    return _by_rows(gradient, scores, dim, dtype, out=out, chunk_bytes=chunk_bytes)


def _by_rows(
    gradient: Callable[[slice], Tensor],
    scores: Tensor,
    dim: int,
    dtype: torch.dtype,
    *,
    out: Tensor | None,
    chunk_bytes: int | None,
) -> Tensor:
    """The gradient of a log-softmax's input; `gradient(rows)` gives rows of the gradient of its result.

    The result is written over `out`, which may be `scores`, unless autograd keeps its graph for another
    backward pass. A chunk has at most `chunk_bytes`; 0 means all rows at once.
    """
    if isinstance(scores, FakeTensor):
        return torch.empty_like(scores) if out is None else out
    if out is None or graph_is_kept():
        out = torch.empty_like(scores)
    step = rows_per_chunk(scores, chunk_bytes)
    for first in range(0, len(scores), step):
        rows = slice(first, first + step)
        aten._log_softmax_backward_data.out(gradient(rows), scores[rows], dim, dtype, out=out[rows])
    return out


def rows_per_chunk(
    scores: Tensor, chunk_bytes: int | None = None, *, device: torch.device | None = None
) -> int:
    """The number of rows of a chunk; all of them where `chunk_bytes` is 0. `device`: as if it were there."""
    if chunk_bytes == 0:
        return len(scores)
    nbytes = chunk_sizes.chunk_bytes(scores.nbytes, chunk_bytes or CHUNK_BYTES, device or scores.device)
    most = nbytes // max(1, scores[0].nbytes)
    return max(1, min(most, len(scores) // FEWEST_CHUNKS))


def use_loss_chunks(graph: fx.Graph) -> None:
    """A pass: compute the gradient of a cross entropy in chunks of rows. Preserves every bit."""
    for target, dims in LOSSES.items():
        for loss in graph.find_nodes(op="call_function", target=target):
            seen = _as_sequence(loss)
            whole, plus = _with_term(seen)
            softmax = _only_user(whole)
            if softmax is None or not _fits(whole, softmax, dims if seen is loss else 3):
                continue
            _grad, _scores, dim, dtype = softmax.args
            softmax.target = loss_gradient
            softmax.args = (loss.args[0], softmax.args[1], *loss.args[2:], dim, dtype, plus)
            for node in dict.fromkeys((whole, seen, loss)):
                graph.erase_node(node)


def _as_sequence(loss: fx.Node) -> fx.Node:
    """The view of a loss's gradient without its third dimension, as sequences have it; else the loss."""
    user = _only_user(loss)
    shape = tuple(loss.meta["val"].shape)
    if user is None or not is_view_op(user.target) or len(shape) != 4 or shape[2] != 1:
        return loss
    return user if tuple(user.meta["val"].shape) == (*shape[:2], shape[3]) else loss


def _with_term(loss: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """The sum of a loss's gradient and one number for each row, and these numbers; else the gradient."""
    user = _only_user(loss)
    if user is None or user.target is not aten.add.Tensor or user.kwargs:
        return loss, None
    terms = [arg for arg in user.args if arg is not loss]
    if len(terms) != 1 or not isinstance(terms[0], fx.Node) or terms[0].target is not aten.expand.default:
        return loss, None
    own, other, both = (node.meta["val"] for node in (loss, terms[0], user))
    is_like = isinstance(other, Tensor) and other.shape == own.shape and other.dtype is own.dtype
    return (user, terms[0]) if is_like and both.dtype is own.dtype else (loss, None)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _fits(loss: fx.Node, softmax: fx.Node, dims: int) -> bool:
    """Whether a log-softmax's backward, over the classes alone, reads the gradient that a loss makes."""
    if softmax.target is not aten._log_softmax_backward_data.default or softmax.args[0] is not loss:
        return False
    value: Any = softmax.meta["val"]
    scores = softmax.args[1]
    return (
        isinstance(scores, fx.Node)
        and value.dim() == dims
        and softmax.args[2] in (1, 1 - dims)
        and softmax.args[3] is value.dtype
        and value.numel() > 0
        and value.is_contiguous()
        and scores.meta["val"].is_contiguous()
    )


def soft_loss_gradient(
    grad: Tensor,
    factors: list[Tensor],
    scores: Tensor,
    dim: int,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
    chunk_bytes: int | None = None,
) -> Tensor:
    """`_log_softmax_backward_data` for the product of `grad` and the `factors`, multiplied in order.

    `scores` are the log-probabilities; `out`, `chunk_bytes`: see `_by_rows`.
    """

    def gradient(rows: slice) -> Tensor:
        some = grad[rows]
        for factor in factors:
            has_rows = factor.dim() == scores.dim() and len(factor) == len(scores)
            some = torch.mul(some, factor[rows] if has_rows else factor)
        return some

    return _by_rows(gradient, scores, dim, dtype, out=out, chunk_bytes=chunk_bytes)


LOSS_GRADIENTS = (loss_gradient, soft_loss_gradient)
"""Ops in chunks that are several ops in eager."""


def use_soft_loss_chunks(graph: fx.Graph) -> None:
    """A pass: the same where targets are probabilities. Preserves every bit."""
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
    """The products that lead to a log-softmax's gradient, the last first; the first product's own input; and
    the factors in the order of multiplication."""
    value, scores = softmax.meta["val"], softmax.args[1]
    if not isinstance(scores, fx.Node) or not _soft_loss_fits(softmax, value, scores.meta["val"]):
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


def _soft_loss_fits(softmax: fx.Node, value: Tensor, scores: Tensor) -> bool:
    is_over_classes = value.dim() > 1 and softmax.args[2] in (1, 1 - value.dim())
    is_dense = bool(value.numel()) and value.is_contiguous() and scores.is_contiguous()
    return is_over_classes and is_dense and softmax.args[3] is value.dtype


def _is_product(node: Any, like: Tensor) -> bool:
    if not isinstance(node, fx.Node) or node.target is not aten.mul.Tensor or len(node.users) != 1:
        return False
    sources = [arg.meta["val"] if isinstance(arg, fx.Node) else None for arg in node.args]
    is_like = node.meta["val"].shape == like.shape and not node.kwargs and is_backward(node)
    return is_like and all(isinstance(s, Tensor) and s.dtype is like.dtype and s.dim() for s in sources)


def _goes_on(node: Any, like: Tensor) -> bool:
    """Whether the gradient of the loss passes through a node."""
    return isinstance(node, fx.Node) and is_backward(node) and node.meta["val"].shape == like.shape


PRODUCTS = (aten.mm.default, aten.addmm.default)


def log_probabilities(product: Any, arguments: list[Any], shape: list[int]) -> Tensor:
    """The log-softmax over the last of two dimensions of a product, in the memory of the product."""
    scores: Tensor = product(*arguments).view(shape)
    if isinstance(scores, FakeTensor):
        return scores
    step = rows_per_chunk(scores)
    for first in range(0, len(scores), step):
        rows = scores[first : first + step]
        rows.copy_(aten._log_softmax(rows, 1, False))
    return scores


def extra_loss_bytes(node: fx.Node) -> int:
    """Bytes that eager keeps live, beyond one chunk, between the ops that a chunked op replaces; negative
    where eager keeps less than a chunk."""
    if node.target not in (*LOSS_GRADIENTS, log_probabilities):
        return 0
    value = node.meta["val"]
    # eager frees such a factor before it makes the result
    frees = node.target is soft_loss_gradient and any(map(partial(_is_freed_by, node), _factors(node)))
    return int((0 if frees else value.nbytes) - rows_per_chunk(value) * value[0].nbytes)


def _factors(node: fx.Node) -> list[fx.Node]:
    """What a `soft_loss_gradient` multiplies."""
    found: list[fx.Node] = []
    fx.node.map_arg(node.args[:2], found.append)
    return found


def _is_freed_by(node: fx.Node, read: fx.Node) -> bool:
    """Whether a node is the last to read a value as large as its own, which an op of the graph made."""
    (key, nbytes), *others = storages_of(read).items()
    if others or nbytes < node.meta["val"].nbytes:
        return False
    places = {each: place for place, each in enumerate(node.graph.nodes)}
    same = [each for each in node.graph.nodes if key in storages_of(each)]
    readers = {user for each in same for user in each.users}
    return all(each.op == "call_function" for each in same) and max(readers, key=places.__getitem__) is node


def use_logits_in_place(graph: fx.Graph) -> None:
    """A pass: write log-probabilities over logits that nothing else reads. Preserves every bit."""
    for softmax in graph.find_nodes(op="call_function", target=aten._log_softmax.default):
        logits = _logits_of(softmax)
        if logits is None:
            continue
        between = softmax.args[0]
        shape = [int(size) for size in softmax.meta["val"].shape]
        softmax.target = log_probabilities
        softmax.args = (logits.target, list(logits.args), shape)
        _erase(graph, between)


def _logits_of(softmax: fx.Node) -> fx.Node | None:
    """The product that a log-softmax of its rows reads, where nothing else reads it."""
    value = softmax.meta["val"]
    source, dim, changes_type = softmax.args
    if is_backward(softmax) or value.dim() != 2 or dim not in (1, -1) or changes_type or not value.numel():
        return None
    while isinstance(source, fx.Node) and _is_view(source) and len(source.users) == 1:
        source = source.args[0]
    if not isinstance(source, fx.Node) or source.target not in PRODUCTS or len(source.users) != 1:
        return None
    fits = value.is_contiguous() and not source.kwargs and source.meta["val"].is_contiguous()
    fits = fits and source.meta["val"].numel() == value.numel()
    return source if fits and _is_small_between(source, softmax) else None


def _is_small_between(product: fx.Node, softmax: fx.Node) -> bool:
    """Whether the ops between the two make little: the pass moves the product behind these ops."""
    nbytes = softmax.meta["val"].nbytes
    node = product.next
    while node is not softmax:
        made = [] if _is_view(node) else iter_tensors(node.meta.get("val"))
        if any(tensor.nbytes * FEWEST_CHUNKS > nbytes for tensor in made):
            return False
        node = node.next
    return True


def _is_view(node: fx.Node) -> bool:
    return is_view_op(node.target) or node.target is aten._unsafe_view.default


def _erase(graph: fx.Graph, node: Any) -> None:
    """Erase a node without readers, and its inputs that lose their last reader, up to the product."""
    while isinstance(node, fx.Node) and not node.users and (_is_view(node) or node.target in PRODUCTS):
        source = node.args[0] if _is_view(node) else None
        graph.erase_node(node)
        node = source
