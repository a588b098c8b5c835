"""An offload store in pinned memory of the host, for values of an accelerator.

Each direction has its own stream. Copies wait for the work that the caller's stream has before them, and the
caller's stream waits for a copy where it needs the result:

    caller's stream   [make v] ..      [free v]  ..  [block for v]     ..  [read v]
    stream out                [copy v]^                            ^
    stream back                                                [copy v]^

So a block of the device goes back to the caller's stream, in whose order it is used again. The allocator need
not know of the copies, and hands the block out at once, as simulated. Only a handle that is dropped before
its copy was waited for tells the allocator (`record_stream`): after an exception, or a step without backward
pass. Pinned blocks are known to their allocator as targets and sources of copies.
"""

import sys

import torch
from torch import Tensor

from lowtide.errors import StoreError
from lowtide.facts.host_memory import host_bytes
from lowtide.offload.offload_store import (
    Layout,
    OffloadHandle,
    OffloadStore,
    Prefetch,
    RestingTensor,
    RestingTransfer,
    bytes_of,
)
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
        free_bytes = host_bytes()
        if free_bytes is not None and nbytes > free_bytes:
            torch.accelerator.empty_host_cache()  # what an earlier plan has pinned
            free_bytes = host_bytes()
        if free_bytes is not None and nbytes > free_bytes:
            raise StoreError(
                f"offloading to 'host' needs {size_and_bytes(nbytes)} of the host's memory, and "
                f"{size_and_bytes(free_bytes)} are free: take a larger budget, or a smaller batch"
            )

    def offload(self, value: Tensor) -> OffloadHandle:
        return _HostHandle(self, value)

    def make_resting(self, layout: Layout, name: str, device: torch.device) -> RestingTensor:
        return _HostRestingTensor(self, layout, name, device)

    def pinned(self, nbytes: int) -> Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            raise StoreError(
                f"offloading to 'host' could not pin {size_and_bytes(nbytes)} of the host's memory "
                f"({str(error).splitlines()[0]}): take a larger budget, or a smaller batch"
            ) from error

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
    _value: Tensor | None = None

    def __init__(self, store: HostStore, value: Tensor) -> None:
        self.layout = Layout.of(value)
        self.store, self.device = store, value.device
        self.host = store.pinned(self.layout.nbytes)
        self._out, _ = store.streams(value.device)
        self._value = value
        self._written = store.copy(self.host, bytes_of(value), self._out)

    def free_value(self) -> None:
        self.store.wait(self._written, self.device)
        self._value = None

    def prefetch(self) -> Prefetch:
        return _HostPrefetch(self)

    def __del__(self) -> None:
        if self._value is not None:
            _keep_for(self._value, self._out)


class _HostPrefetch(Prefetch):
    _block: Tensor | None = None

    def __init__(self, handle: _HostHandle) -> None:
        self._handle = handle
        _, self._back = handle.store.streams(handle.device)
        self._block = torch.empty(handle.layout.nbytes, dtype=torch.uint8, device=handle.device)
        self._read = handle.store.copy(self._block, handle.host, self._back)

    def wait(self) -> Tensor:
        block, self._block = self._block, None
        assert block is not None, "a prefetch is waited for once"
        self._handle.store.wait(self._read, self._handle.device)
        return self._handle.layout.over(block)

    def __del__(self) -> None:
        if self._block is not None:
            _keep_for(self._block, self._back)


class _HostRestingTensor(RestingTensor):
    def __init__(self, store: HostStore, layout: Layout, name: str, device: torch.device) -> None:
        self.layout, self.name = layout, name
        self.store, self.device = store, device
        self.host = store.pinned(self.layout.nbytes)
        self.found_at(self.host.data_ptr())

    def value(self) -> Tensor:
        return self.layout.over(self.host)

    def start_read(self, target: Tensor, start: int = 0) -> RestingTransfer:
        _, back = self.store.streams(self.device)
        done = self.store.copy(target, self.host[start : start + len(target)], back)
        return _HostRestingTransfer(self, target, back, done, is_write=False)

    def start_write(self, source: Tensor, start: int = 0) -> RestingTransfer:
        out, _ = self.store.streams(self.device)
        done = self.store.copy(self.host[start : start + len(source)], source, out)
        return _HostRestingTransfer(self, source, out, done, is_write=True)


class _HostRestingTransfer(RestingTransfer):
    """The caller's stream waits for a read, and the host for a write: the user's object is on the host."""

    def __init__(
        self,
        resting: _HostRestingTensor,
        block: Tensor,
        stream: torch.Stream,
        done: torch.Event,
        *,
        is_write: bool,
    ) -> None:
        self._resting, self._stream, self._done, self._is_write = resting, stream, done, is_write
        self._block: Tensor | None = block

    def wait(self) -> None:
        self._block = None
        if self._is_write:
            self._done.synchronize()
        else:
            self._resting.store.wait(self._done, self._resting.device)

    def drop(self) -> None:
        if self._block is not None:
            _keep_for(self._block, self._stream)
            self._block = None


def _keep_for(block: Tensor, stream: torch.Stream) -> None:
    """Let the allocator keep a block that is dropped, until a stream is done with the copies it has now."""
    if not sys.is_finalizing():
        block.record_stream(stream)
