"""A stored value as a tiny tensor, since that is what autograd passes from the forward to the backward pass.

The tensor's one number names the parcel, and its memory keeps the parcel: whoever frees the tensor, as
autograd does with a step that no backward pass follows, gives the place in the store back.
"""

import itertools
import weakref

import torch
from torch import Tensor

from lowtide.errors import StoreError
from lowtide.stores.store import Arrival, Parcel, Store

_NUMBERS = itertools.count(1)
_STORES: "weakref.WeakValueDictionary[int, Store]" = weakref.WeakValueDictionary()
_PARCELS: "weakref.WeakValueDictionary[int, Parcel]" = weakref.WeakValueDictionary()


class _Memory(bytearray):
    """The memory of a handle."""

    parcel: Parcel


def number_of(store: Store) -> int:
    """What graphs call an open store by; they do not keep it open."""
    known = next((number for number, other in _STORES.items() if other is store), None)
    number = known if known is not None else next(_NUMBERS)
    _STORES[number] = store
    return number


def begin_to_leave(number: int, value: Tensor) -> Parcel:
    """Begin to write a value to a store; an op of forward graphs."""
    return _STORES[number].send(value)


def leave(parcel: Parcel) -> Tensor:
    """Let go of a value once it is in the store; the handle stands for it."""
    parcel.let_go()
    number = next(_NUMBERS)
    memory = _Memory(number.to_bytes(8, "little"))
    memory.parcel = _PARCELS[number] = parcel
    return torch.frombuffer(memory, dtype=torch.int64)


def fetch(handle: Tensor) -> Arrival:
    """Begin to bring a value back; an op of backward graphs."""
    parcel = _PARCELS.get(int(handle))
    if parcel is None:
        raise StoreError(
            "a swapped value is gone, since something copied the tensor that stands for it, as saved-tensor "
            "hooks do (torch.autograd.graph.save_on_cpu): leave such hooks out, or plan without swap"
        )
    return parcel.fetch()


def arrived(arrival: Arrival) -> Tensor:
    """Wait for a value; before its first reader."""
    return arrival.value()
