"""Log-probabilities written over the logits that they are made of, a few rows at a time.

Where nothing but the log-softmax reads the product that the logits are, as in a model that returns its loss
alone, eager holds both at once; each row of one needs that row of the other alone.
"""

from typing import Any

import torch
from torch import Tensor, fx

from lowtide.ops.calls import iter_tensors
from lowtide.ops.loss_chunks import LEAST_SLICES, rows_at_a_time
from lowtide.ops.schema import is_backward, is_view_op
from lowtide.torch_compat.hooks import FakeTensor

aten = torch.ops.aten

PRODUCTS = (aten.mm.default, aten.addmm.default)


def log_probabilities(product: Any, arguments: list[Any], shape: list[int]) -> Tensor:
    """The log-softmax over the last of two dimensions of a product, in the memory of the product."""
    scores: Tensor = product(*arguments).view(shape)
    if isinstance(scores, FakeTensor):
        return scores
    step = rows_at_a_time(scores)
    for first in range(0, len(scores), step):
        rows = scores[first : first + step]
        rows.copy_(aten._log_softmax(rows, 1, False))
    return scores


def extra_score_bytes(node: fx.Node) -> int:
    """What eager holds of the logits beside the log-probabilities, beyond one slice."""
    if node.target is not log_probabilities:
        return 0
    value = node.meta["val"]
    return int(value.nbytes - rows_at_a_time(value) * value[0].nbytes)


def use_score_rows(graph: fx.Graph) -> None:
    """Let log-probabilities take the place of their logits; preserves every bit."""
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
    """Whether little is made between the two: eager holds the logits beside it, and they come later here."""
    nbytes = softmax.meta["val"].nbytes
    node = product.next
    while node is not softmax:
        made = [] if _is_view(node) else iter_tensors(node.meta.get("val"))
        if any(tensor.nbytes * LEAST_SLICES > nbytes for tensor in made):
            return False
        node = node.next
    return True


def _is_view(node: fx.Node) -> bool:
    return is_view_op(node.target) or node.target is aten._unsafe_view.default


def _erase(graph: fx.Graph, node: Any) -> None:
    """A node that nobody reads any more, and whatever only it read, up to the product."""
    while isinstance(node, fx.Node) and not node.users and (_is_view(node) or node.target in PRODUCTS):
        source = node.args[0] if _is_view(node) else None
        graph.erase_node(node)
        node = source
