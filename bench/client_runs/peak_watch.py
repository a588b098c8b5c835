"""The most bytes that torch has live in the last steps of a training, whoever has the loop.

The record of torch's allocator begins one step before: of a block that is older it does not tell when that
is freed, and all that one step makes and the next one frees, gradients and outputs, must be known. What is
live at the end is counted by its tensors, and the record is read backwards from there.
"""

import gc
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.optim import Optimizer

from lowtide.torch_compat.allocation_record import AllocationRecord
from lowtide.trace.model_call import tensors_in

STEPS = 6
"""Optimizer steps of a client. The first ones plan, and see what the loop does with the outputs."""
FIRST, MARKED = STEPS - 3, STEPS - 2
"""After these steps the record begins, and what counts begins."""


class PeakWatch:
    """`peak_bytes` of the last two steps; `beside_bytes` is what was live before and after them and belongs
    to neither model, optimizer nor batch: a dataset, another model. Both are 0 where nothing was measured."""

    def __init__(self) -> None:
        self.peak_bytes = self.beside_bytes = 0
        self._record = AllocationRecord(on_interruption=lambda: None)
        self._before: dict[int, int] = {}

    def after_step(
        self, number: int, models: Iterable[nn.Module], optimizers: Iterable[Optimizer], batch: object
    ) -> None:
        if number == FIRST:
            self._before = _live()
            self._record.start()
        elif number == MARKED and self._record.is_on:
            self._record.mark()
        elif number == STEPS and self._record.can_stop:
            self._stop(_own(models, optimizers, batch))

    def _stop(self, own: dict[int, int]) -> None:
        sizes = self._record.stop()
        live = _live() | own
        beside = {place: nbytes for place, nbytes in live.items() if self._before.get(place) == nbytes}
        self.beside_bytes = sum(nbytes for place, nbytes in beside.items() if place not in own)
        mark = sizes.index(None)
        at_end = total = sum(filter(None, sizes))
        highest = total = sum(filter(None, sizes[:mark]))
        for nbytes in filter(None, sizes[mark:]):
            total += nbytes
            highest = max(highest, total)
        self.peak_bytes = sum(live.values()) + highest - at_end


def _own(models: Iterable[nn.Module], optimizers: Iterable[Optimizer], batch: object) -> dict[int, int]:
    """Storages of models, gradients, optimizer states and batch."""
    tensors: list[object] = [batch]
    for model in models:
        tensors += [*model.parameters(), *model.buffers()]
    for optimizer in optimizers:
        tensors += [list(optimizer.state.values()), [group["params"] for group in optimizer.param_groups]]
    found = list(tensors_in(tensors))
    return _storages(
        [*found, *(tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None)]
    )


def _live() -> dict[int, int]:
    """Storages of all tensors that Python knows."""
    gc.collect()
    return _storages(each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    return dict(_places(tensors))


def _places(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, int]]:
    for tensor in tensors:
        if tensor.layout is torch.strided and tensor.untyped_storage().device.type == "cpu":
            yield tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
