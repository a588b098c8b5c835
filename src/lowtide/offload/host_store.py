"""Pinned memory of the host, for values of an accelerator.

Not run so far, for want of an accelerator: written against torch's streams and events, each direction on a
stream of its own.
"""

import os

import torch
from torch import Tensor

from lowtide.errors import StoreError
from lowtide.offload.store import Layout, OffloadHandle, Prefetch, Store, bytes_of
from lowtide.units import size_and_bytes


class HostStore(Store):
    text = "host"

    def __init__(self) -> None:
        self._streams: dict[torch.device, tuple[torch.Stream, torch.Stream]] = {}

    def streams(self, device: torch.device) -> tuple[torch.Stream, torch.Stream]:
        """The streams out of and back to a device, which is where the values are: it need not be the current
        one."""
        if device not in self._streams:
            self._streams[device] = (torch.Stream(device=device), torch.Stream(device=device))
        return self._streams[device]

    def reserve(self, nbytes: int) -> None:
        free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if nbytes > free_bytes:
            raise StoreError(
                f"offloading to 'host' needs {size_and_bytes(nbytes)} of the host's memory, and "
                f"{size_and_bytes(free_bytes)} are free: take a larger budget, or a smaller batch"
            )

    def send(self, value: Tensor) -> OffloadHandle:
        return _HostParcel(self, value)

    def copy(self, target: Tensor, source: Tensor, stream: torch.Stream) -> torch.Event:
        """Copy beside the current stream, after all that it does so far; the event comes when it is done."""
        stream.wait_stream(torch.accelerator.current_stream(stream.device))
        with stream:
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def wait(self, event: torch.Event, device: torch.device) -> None:
        """Let whatever a device's current stream does next come after an event."""
        torch.accelerator.current_stream(device).wait_event(event)


class _HostParcel(OffloadHandle):
    def __init__(self, store: HostStore, value: Tensor) -> None:
        self.layout = Layout.of(value)
        self.store, self.device = store, value.device
        self.host = torch.empty(self.layout.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._value: Tensor | None = value
        self._written = store.copy(self.host, bytes_of(value), store.streams(value.device)[0])

    def let_go(self) -> None:
        self.store.wait(self._written, self.device)
        self._value = None

    def fetch(self) -> Prefetch:
        return _HostArrival(self)


class _HostArrival(Prefetch):
    def __init__(self, parcel: _HostParcel) -> None:
        self._parcel = parcel
        _, back = parcel.store.streams(parcel.device)
        self._block = torch.empty(parcel.layout.nbytes, dtype=torch.uint8, device=parcel.device)
        # so that the allocator waits for the copy even where nobody asks for the value
        self._block.record_stream(back)
        self._read = parcel.store.copy(self._block, parcel.host, back)

    def value(self) -> Tensor:
        self._parcel.store.wait(self._read, self._parcel.device)
        return self._parcel.layout.over(self._block)
