"""What a store is: a place outside of the memory that is planned, where values wait for the backward pass.

A value is sent (`Store.send`), let go of when its bytes are there (`Parcel.let_go`), and fetched into new
memory (`Parcel.fetch`, `Arrival.value`). Both copies run beside the caller; sends happen in their order, and
so do fetches. All of the memory that this takes is the value's own and that of the fetched copy, made and
freed by the caller's own calls: how fast a store is changes no byte of it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies in its storage, which takes `nbytes` in all."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    nbytes: int

    @classmethod
    def of(cls, value: Tensor) -> Self:
        storage = value.untyped_storage()
        return cls(
            value.dtype, tuple(value.shape), value.stride(), int(value.storage_offset()), storage.nbytes()
        )

    def over(self, block: Tensor) -> Tensor:
        """The tensor whose storage is that of `block`."""
        empty = torch.empty(0, dtype=self.dtype, device=block.device)
        return empty.set_(block.untyped_storage(), self.offset, self.shape, self.strides)


def bytes_of(value: Tensor) -> Tensor:
    """All bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())


class Arrival(ABC):
    """A copy that is on its way back."""

    @abstractmethod
    def value(self) -> Tensor:
        """The value, once it is there; `StoreError` where it could not be read."""


class Parcel(ABC):
    """A value in a store. Its place there is free again when nobody refers to the parcel any more."""

    @abstractmethod
    def let_go(self) -> None:
        """Wait until the bytes are in the store, and free the value; `StoreError` where they do not get
        there."""

    @abstractmethod
    def fetch(self) -> Arrival:
        """Begin to read it into new memory, which is there from now on."""


class Store(ABC):
    """`text` is how the user names it, as in `disk:/scratch`."""

    text: str

    @abstractmethod
    def reserve(self, nbytes: int) -> None:
        """Make sure of so many bytes in all; `StoreError` where there are not as many."""

    @abstractmethod
    def send(self, value: Tensor) -> Parcel:
        """Begin to write a value, which nobody may change until it is let go of."""
