"""Pinned memory of the host, for values of an accelerator.

Not run so far, for want of an accelerator: written against torch's streams and events, each direction on a
stream of its own.
"""

import os

import torch
from torch import Tensor

from lowtide.errors import StoreError
from lowtide.facts.units import size_and_bytes
from lowtide.stores.store import Arrival, Layout, Parcel, Store, bytes_of


class HostStore(Store):
    text = "host"

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.out = torch.Stream(device=self.device)
        self.back = torch.Stream(device=self.device)

    def reserve(self, nbytes: int) -> None:
        free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if nbytes > free_bytes:
            raise StoreError(
                f"swapping to 'host' needs {size_and_bytes(nbytes)} of the host's memory, and "
                f"{size_and_bytes(free_bytes)} are free: take a larger budget, or a smaller batch"
            )

    def send(self, value: Tensor) -> Parcel:
        return _HostParcel(self, value)

    def copy(self, target: Tensor, source: Tensor, stream: torch.Stream) -> torch.Event:
        """Copy beside the current stream, after all that it does so far; the event comes when it is done."""
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        with stream:
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def wait(self, event: torch.Event) -> None:
        """Let whatever the current stream does next come after an event."""
        torch.accelerator.current_stream(self.device).wait_event(event)


class _HostParcel(Parcel):
    def __init__(self, store: HostStore, value: Tensor) -> None:
        self.layout = Layout.of(value)
        self.store = store
        self.host = torch.empty(self.layout.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._value: Tensor | None = value
        self._written = store.copy(self.host, bytes_of(value), store.out)

    def let_go(self) -> None:
        self.store.wait(self._written)
        self._value = None

    def fetch(self) -> Arrival:
        return _HostArrival(self)


class _HostArrival(Arrival):
    def __init__(self, parcel: _HostParcel) -> None:
        self._parcel = parcel
        self._block = torch.empty(parcel.layout.nbytes, dtype=torch.uint8, device=parcel.store.device)
        self._block.record_stream(parcel.store.back)
        self._read = parcel.store.copy(self._block, parcel.host, parcel.store.back)

    def value(self) -> Tensor:
        self._parcel.store.wait(self._read)
        return self._parcel.layout.over(self._block)
