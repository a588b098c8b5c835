"""A language model's head and its loss in chunks of rows: no tensor has all logits. This rounds.

    forward    for each chunk of rows:  logits -> log-softmax -> what the loss reads of each row
    backward   for each chunk of rows:  logits -> log-softmax -> their gradient -> those of the head's input,
                                        weight and bias

The gradient of the weight is a sum over all rows. Eager adds it inside of one product, chunks add up several
products: the low bits differ. So do those of the loss, and products of fewer rows may round otherwise. The
logits are computed twice, a third more work for the head. Weights in half precision get their gradient added
up in float32.

`steps` say which rows of the product the loss reads, where a slice leaves some out: shapes and slices, as the
model has them, without the last dimension.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.ops import chunk_sizes
from lowtide.ops.loss_chunks import FEWEST_CHUNKS, LARGE_CHUNK_BYTES
from lowtide.torch_compat.dispatch import FakeTensor

aten = torch.ops.aten

Steps = tuple[tuple[str, tuple[int, ...]], ...]
NONE, MEAN, SUM = 0, 1, 2
"""Reductions of torch's losses."""


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A product of `hidden` (rows, width) and `weight` (width, classes), whose log-softmax has a `dtype`."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    rows: Tensor | None
    dtype: torch.dtype

    @classmethod
    def of(cls, arguments: list[Tensor], steps: Steps, dtype: torch.dtype) -> "Head":
        *bias, hidden, weight = arguments
        return cls(hidden, weight, bias[0] if bias else None, rows_of(len(hidden), steps, hidden), dtype)

    @property
    def size(self) -> int:
        """The number of rows that the loss reads."""
        return len(self.hidden) if self.rows is None else len(self.rows)

    def chunks(self) -> Iterator[slice]:
        step = rows_of_chunk(self.size, self.weight.shape[1], self.dtype, self.hidden.device)
        return (slice(first, min(self.size, first + step)) for first in range(0, self.size, step))

    def hidden_of(self, part: slice) -> Tensor:
        return self.hidden[part] if self.rows is None else self.hidden[self.rows[part]]

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Those of some rows."""
        logits = hidden @ self.weight if self.bias is None else torch.addmm(self.bias, hidden, self.weight)
        found: Tensor = aten._log_softmax(logits.to(self.dtype), 1, False)
        return found


def rows_of(number: int, steps: Steps, like: Tensor) -> Tensor | None:
    """The rows of the product in the order in which the loss reads them; None for all, in their order."""
    if not any(kind == "slice" for kind, _ in steps):
        return None
    rows = torch.arange(number, device=like.device)
    for kind, sizes in steps:
        rows = aten.slice(rows, *sizes) if kind == "slice" else rows.reshape(sizes)
    return rows.flatten()


def rows_of_chunk(size: int, classes: int, dtype: torch.dtype, device: torch.device) -> int:
    """The number of rows of a chunk: a sixteenth of all, or as many as take 8 MiB on a CPU."""
    row_bytes = max(1, classes * dtype.itemsize)
    nbytes = chunk_sizes.chunk_bytes(size * row_bytes, LARGE_CHUNK_BYTES, device)
    return max(1, min(nbytes // row_bytes, size // FEWEST_CHUNKS))


def head_values(  # noqa: PLR0917 - what the ops of torch take
    arguments: list[Tensor],
    steps: Steps,
    dtype: torch.dtype,
    target: Tensor,
    ignore_index: int | None,
    with_sums: bool,
) -> tuple[Tensor, ...]:
    """The log-probability of each row's target, 0 for ignored ones; `with_sums`, the sum of each row too."""
    head = Head.of(arguments, steps, dtype)
    hidden, flat = head.hidden, target.reshape(-1)
    values = [torch.empty(len(flat), dtype=dtype, device=hidden.device) for _ in range(1 + with_sums)]
    if isinstance(hidden, FakeTensor):
        return tuple(values)
    for part in head.chunks():
        scores = head.log_probabilities(head.hidden_of(part))
        some = flat[part]
        ignored = None if ignore_index is None else some == ignore_index
        index = some if ignored is None else some.masked_fill(ignored, 0)
        picked = scores.gather(1, index.unsqueeze(1)).squeeze(1)
        values[0][part] = picked if ignored is None else picked.masked_fill(ignored, 0.0)
        if with_sums:
            torch.sum(scores, 1, out=values[1][part])
    return tuple(values)


def picked_loss(
    picked: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """`nll_loss_forward` for the log-probability of each row's target: the loss, and the sum of weights."""
    ignored = target == ignore_index
    share = (~ignored).to(torch.float32)
    if weight is not None:
        share = share * weight[target.masked_fill(ignored, 0)].to(torch.float32)
    losses = -picked.to(torch.float32) * share
    if reduction == NONE:
        return losses.to(picked.dtype), torch.zeros((), dtype=picked.dtype, device=picked.device)
    total = share.sum()
    loss = losses.sum() / total if reduction == MEAN else losses.sum()
    return loss.to(picked.dtype), total.to(picked.dtype)


def loss_head_gradients(  # noqa: PLR0917 - what the ops of torch take
    arguments: list[Tensor],
    steps: Steps,
    dtype: torch.dtype,
    wanted: tuple[bool, bool, bool],
    grad: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
    plus: Tensor | None,
) -> tuple[Tensor, ...]:
    """The gradients of a head's input, weight and bias, as far as they are wanted, for a loss of classes.

    `plus` is added to the gradient of the log-probabilities, as that of label smoothing is.
    """
    head = Head.of(arguments, steps, dtype)

    def gradient(part: slice, scores: Tensor) -> Tensor:
        own = grad[part] if grad.dim() else grad
        made: Tensor = aten.nll_loss_backward(
            own, scores, target[part], weight, reduction, ignore_index, total_weight
        )
        return made if plus is None else made.add_(plus[part])

    return _gradients(head, gradient, wanted)


def picked_head_gradients(  # noqa: PLR0917 - what the ops of torch take
    arguments: list[Tensor],
    steps: Steps,
    dtype: torch.dtype,
    wanted: tuple[bool, bool, bool],
    grad: Tensor,
    target: Tensor,
) -> tuple[Tensor, ...]:
    """The same for the gradients `grad` of the log-probability of each row's target."""
    head = Head.of(arguments, steps, dtype)
    grads, index = grad.reshape(-1, 1), target.reshape(-1, 1)

    def gradient(part: slice, scores: Tensor) -> Tensor:
        return torch.zeros_like(scores).scatter_(1, index[part], grads[part].to(scores.dtype))

    return _gradients(head, gradient, wanted)


HEAD_OPS = (head_values, picked_loss, loss_head_gradients, picked_head_gradients)


def unread_logits(shape: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a loop gets that said it reads no logits: NaN, in no memory."""
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(shape)


def _gradients(
    head: Head, gradient: Callable[[slice, Tensor], Tensor], wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, ...]:
    width, classes = head.weight.shape
    hidden, half = head.hidden, head.hidden.dtype.itemsize < torch.float32.itemsize
    sums: dict[str, Any] = {"dtype": torch.float32 if half else hidden.dtype, "device": hidden.device}
    if isinstance(hidden, FakeTensor):
        shapes = (hidden.shape, (classes, width), (1, classes))
        pairs = zip(shapes, wanted, strict=True)
        return tuple(
            torch.empty(s, dtype=hidden.dtype, device=hidden.device) for s, is_one in pairs if is_one
        )
    of_hidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if wanted[0] else None
    of_weight = torch.zeros(classes, width, **sums) if wanted[1] else None
    of_bias = torch.zeros(1, classes, **sums) if wanted[2] else None
    for part in head.chunks():
        some = head.hidden_of(part)
        scores = head.log_probabilities(some)
        made = aten._log_softmax_backward_data(gradient(part, scores), scores, 1, head.dtype)
        del scores
        made = made.to(hidden.dtype)
        if of_hidden is not None:
            of_hidden[part if head.rows is None else head.rows[part]] = made @ head.weight.t()
        if of_weight is not None and half:
            of_weight.add_(made.t() @ some)
        elif of_weight is not None:
            of_weight.addmm_(made.t(), some)
        if of_bias is not None:
            of_bias.add_(made.sum(0, keepdim=True, dtype=of_bias.dtype))
    found = (each for each in (of_hidden, of_weight, of_bias) if each is not None)
    return tuple(each.to(hidden.dtype) for each in found)
