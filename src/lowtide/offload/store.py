"""What a store is: a place outside of the memory that is planned, where values wait for the backward pass.

A value is sent (`Store.send`), let go of when its bytes are there (`Parcel.let_go`), and fetched into new
memory (`Parcel.fetch`, `Arrival.value`). Both copies run beside the caller; sends happen in their order, and
so do fetches. All of the memory that this takes is the value's own and that of the fetched copy, made and
freed by the caller's own calls: how fast a store is changes no byte of it.

A stored value as a tiny tensor, since that is what autograd passes from the forward to the backward pass.

The tensor's one number names the parcel, and its memory keeps the parcel: whoever frees the tensor, as
autograd does with a step that no backward pass follows, gives the place in the store back.
"""

import itertools
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from lowtide.errors import StoreError


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


class Prefetch(ABC):
    """A copy that is on its way back."""

    @abstractmethod
    def value(self) -> Tensor:
        """The value, once it is there; `StoreError` where it could not be read."""


class OffloadHandle(ABC):
    """A value in a store. Its place there is free again when nobody refers to the parcel any more."""

    @abstractmethod
    def let_go(self) -> None:
        """Wait until the bytes are in the store, and free the value; `StoreError` where they do not get
        there."""

    @abstractmethod
    def fetch(self) -> Prefetch:
        """Begin to read it into new memory, which is there from now on."""


class Store(ABC):
    """`text` is how the user names it, as in `disk:/scratch`."""

    text: str

    @abstractmethod
    def reserve(self, nbytes: int) -> None:
        """Make sure of so many bytes in all; `StoreError` where there are not as many."""

    @abstractmethod
    def send(self, value: Tensor) -> OffloadHandle:
        """Begin to write a value, which nobody may change until it is let go of."""


_NUMBERS = itertools.count(1)
_STORES: "weakref.WeakValueDictionary[int, Store]" = weakref.WeakValueDictionary()
_PARCELS: "weakref.WeakValueDictionary[int, OffloadHandle]" = weakref.WeakValueDictionary()


class _Memory(bytearray):
    """The memory of a handle."""

    parcel: OffloadHandle


def number_of(store: Store) -> int:
    """What graphs call an open store by; they do not keep it open."""
    known = next((number for number, other in _STORES.items() if other is store), None)
    number = known if known is not None else next(_NUMBERS)
    _STORES[number] = store
    return number


def begin_to_leave(number: int, value: Tensor) -> OffloadHandle:
    """Begin to write a value to a store; an op of forward graphs."""
    return _STORES[number].send(value)


def leave(parcel: OffloadHandle) -> Tensor:
    """Let go of a value once it is in the store; the handle stands for it."""
    parcel.let_go()
    number = next(_NUMBERS)
    memory = _Memory(number.to_bytes(8, "little"))
    memory.parcel = _PARCELS[number] = parcel
    return torch.frombuffer(memory, dtype=torch.int64)


def fetch(handle: Tensor) -> Prefetch:
    """Begin to bring a value back; an op of backward graphs."""
    parcel = _PARCELS.get(int(handle))
    if parcel is None:
        raise StoreError(
            "an offloaded value is gone, since something copied the tensor that stands for it, as "
            "saved-tensor hooks do (torch.autograd.graph.save_on_cpu): leave such hooks out, or "
            "plan without offload"
        )
    return parcel.fetch()


def arrived(arrival: Prefetch) -> Tensor:
    """Wait for a value; before its first reader."""
    return arrival.value()
