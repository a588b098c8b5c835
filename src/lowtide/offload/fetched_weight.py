"""The ops by which graphs read a weight that rests on a store, into a block of torch.

    weight (rests) ── start_fetch ── finish_fetch ── block ── mm ── ...

The read runs beside the caller between the two. The block is allocated when the read begins.
"""

from typing import Any

import torch
from torch import Tensor

from lowtide.offload.offload_store import RestingTensor, RestingTransfer, resting_of


class WeightFetch:
    """A read of a weight that has begun. A weight in ordinary memory, as after `weight.data = other`, is read
    where it is."""

    _reading: RestingTransfer | None = None
    _block: Tensor | None = None

    def __init__(self, weight: Tensor) -> None:
        self._resting: RestingTensor | None = resting_of(weight)
        self._weight: Tensor | None = weight if self._resting is None else None
        if self._resting is not None:
            self._block = torch.empty(self._resting.nbytes, dtype=torch.uint8, device=weight.device)
            self._reading = self._resting.start_read(self._block)

    def wait(self) -> Tensor:
        if self._resting is None:
            assert self._weight is not None
            return self._weight
        assert self._reading is not None and self._block is not None, "a fetch is waited for once"
        reading, block = self._reading, self._block
        reading.wait()
        self._reading = self._block = None
        return self._resting.layout.over(block)

    def __del__(self) -> None:
        if self._reading is not None:
            self._reading.drop()


def fetched(weight: Tensor) -> Tensor:
    """The op of a graph for both: a weight of the store in memory of torch."""
    return finish_fetch(start_fetch(weight))


def start_fetch(weight: Tensor) -> WeightFetch:
    """Begin to read a weight."""
    return WeightFetch(weight)


def finish_fetch(fetch: Any) -> Tensor:
    """The weight, right before its first reader."""
    found: Tensor = fetch.wait()
    return found
