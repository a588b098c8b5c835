"""An offload store in pinned memory of the host, for values of an accelerator.

Shortcoming: never run so far, for want of an accelerator. Each direction has its own stream.
"""

import os

import torch
from torch import Tensor

from lowtide.errors import StoreError
from lowtide.offload.offload_store import Layout, OffloadHandle, OffloadStore, Prefetch, bytes_of
from lowtide.units import size_and_bytes


class HostStore(OffloadStore):
    text = "host"

    def __init__(self) -> None:
        self._streams: dict[torch.device, tuple[torch.Stream, torch.Stream]] = {}

    def streams(self, device: torch.device) -> tuple[torch.Stream, torch.Stream]:
        """The streams out of and back to a device, which need not be the current device."""
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

    def offload(self, value: Tensor) -> OffloadHandle:
        return _HostHandle(self, value)

    def copy(self, target: Tensor, source: Tensor, stream: torch.Stream) -> torch.Event:
        """Copy on `stream` after all work so far of the current stream; the event marks the copy's end."""
        stream.wait_stream(torch.accelerator.current_stream(stream.device))
        with stream:
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def wait(self, event: torch.Event, device: torch.device) -> None:
        """Let a device's current stream wait for an event."""
        torch.accelerator.current_stream(device).wait_event(event)


class _HostHandle(OffloadHandle):
    def __init__(self, store: HostStore, value: Tensor) -> None:
        self.layout = Layout.of(value)
        self.store, self.device = store, value.device
        self.host = torch.empty(self.layout.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._value: Tensor | None = value
        self._written = store.copy(self.host, bytes_of(value), store.streams(value.device)[0])

    def free_value(self) -> None:
        self.store.wait(self._written, self.device)
        self._value = None

    def prefetch(self) -> Prefetch:
        return _HostPrefetch(self)


class _HostPrefetch(Prefetch):
    def __init__(self, handle: _HostHandle) -> None:
        self._handle = handle
        _, back = handle.store.streams(handle.device)
        self._block = torch.empty(handle.layout.nbytes, dtype=torch.uint8, device=handle.device)
        # so that the allocator waits for the copy, even where no op reads the value
        self._block.record_stream(back)
        self._read = handle.store.copy(self._block, handle.host, back)

    def wait(self) -> Tensor:
        self._handle.store.wait(self._read, self._handle.device)
        return self._handle.layout.over(self._block)
