"""An offload store in a file without a name, in a folder that the user chooses.

The file is unlinked when it is opened, so that the process leaves no file behind, however it ends. Writes go
through to the disk and leave the page cache. So the memory of an offloaded value is really free, and a
transfer takes as long on a machine without spare memory as on one with plenty.
"""

import errno
import mmap
import os
import shutil
import tempfile
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lowtide.errors import StoreError
from lowtide.offload.offload_store import (
    Layout,
    OffloadHandle,
    OffloadStore,
    Prefetch,
    RestingTensor,
    bytes_of,
)
from lowtide.units import size_and_bytes

PAGE_BYTES = max(4096, mmap.ALLOCATIONGRANULARITY)
THREADS = "lowtide-store"
"""Prefix of the names of a store's threads."""


def whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class Slots:
    """Ranges of a file, each taken from the first gap that is large enough, else at the end.

    Any thread may call `give_back` at any time, as garbage collection does. Only one thread at a time may
    call the other methods.
    """

    def __init__(self) -> None:
        self.end = 0
        """the end of the last range that was ever taken"""
        self._gaps: list[tuple[int, int]] = []
        self._returned: deque[tuple[int, int]] = deque()

    def take(self, nbytes: int) -> int:
        """The start of a free range of `nbytes`."""
        nbytes = whole_pages(nbytes)
        self._merge_gaps()
        for index, (start, size) in enumerate(self._gaps):
            if size >= nbytes:
                self._gaps[index : index + 1] = [(start + nbytes, size - nbytes)] if size > nbytes else []
                return start
        start = self.end
        if self._gaps and sum(self._gaps[-1]) == self.end:
            start, _ = self._gaps.pop()
        self.end = start + nbytes
        return start

    def give_back(self, start: int, nbytes: int) -> None:
        self._returned.append((start, whole_pages(nbytes)))

    def _merge_gaps(self) -> None:
        while self._returned:
            insort(self._gaps, self._returned.popleft())
        merged: list[tuple[int, int]] = []
        for start, size in self._gaps:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self._gaps = merged


class DiskStore(OffloadStore):
    """Values of this process in `folder`; another process, or a fork of this one, has its own file."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.text = f"disk:{folder}"
        self._reserved_bytes = 0
        self._opening = threading.Lock()
        self._file = _File(self)

    def reserve(self, nbytes: int) -> None:
        self._own_file().grow_to(whole_pages(nbytes))
        self._reserved_bytes = max(self._reserved_bytes, whole_pages(nbytes))

    @property
    def file_bytes(self) -> int:
        """Bytes of the file on the disk."""
        return os.fstat(self._file.file.fileno()).st_blocks * 512

    def offload(self, value: Tensor) -> OffloadHandle:
        return _DiskHandle(self._own_file(), value)

    def make_resting(self, layout: Layout, name: str, device: torch.device) -> RestingTensor:
        from lowtide.offload.resting_tensor import DiskRestingTensor

        return DiskRestingTensor(self._own_file(), layout, name)

    def _own_file(self) -> "_File":
        with self._opening:
            if self._file.process != os.getpid():
                self._file = _File(self)
                self._file.grow_to(self._reserved_bytes)
            return self._file


class _File:
    """An open file, its slots, and one thread for each direction."""

    def __init__(self, store: DiskStore) -> None:
        self.folder, self.text = store.folder, store.text
        self.process = os.getpid()
        self.file = _opened(store.folder)
        self.nbytes = 0
        self.slots = Slots()
        self.writer = ThreadPoolExecutor(1, thread_name_prefix=f"{THREADS}-write")
        self.reader = ThreadPoolExecutor(1, thread_name_prefix=f"{THREADS}-read")
        self._taking = threading.Lock()

    def take(self, nbytes: int) -> int:
        with self._taking:
            start = self.slots.take(nbytes)
            try:
                self.grow_to(self.slots.end)
            except StoreError:
                self.slots.give_back(start, nbytes)
                raise
            return start

    def grow_to(self, nbytes: int) -> None:
        """Allocate `nbytes` on the disk before a value needs them."""
        if nbytes <= self.nbytes:
            return
        more_bytes, free_bytes = nbytes - self.nbytes, shutil.disk_usage(self.folder).free
        try:
            if more_bytes > free_bytes:  # posix_fallocate would first fill the disk
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self.file.fileno(), self.nbytes, more_bytes)
        except OSError as error:
            raise StoreError(
                f"offloading to '{self.text}' needs {size_and_bytes(more_bytes)} there, and "
                f"{size_and_bytes(free_bytes)} are free ({error.strerror}): make room, or choose another "
                "folder with offload='disk:FOLDER'"
            ) from error
        self.nbytes = nbytes

    def write(self, box: list[memoryview], start: int) -> None:
        """Write a value, in the writer's thread, and drop the thread's reference to its memory."""
        source = box.pop()
        try:
            done, number = 0, self.file.fileno()
            while done < len(source):
                done += os.pwrite(number, source[done:], start + done)
            os.fdatasync(number)
            self.forget_pages(start, len(source))
        finally:
            del source

    def read(self, box: list[memoryview], start: int) -> None:
        """Read a value, in the reader's thread."""
        target = box.pop()
        try:
            done, number = 0, self.file.fileno()
            while done < len(target):
                count = os.preadv(number, [target[done:]], start + done)
                if not count:
                    raise OSError(errno.EIO, "the file is shorter than what was written")
                done += count
            self.forget_pages(start, len(target))
        finally:
            del target

    def forget_pages(self, start: int, nbytes: int) -> None:
        """Drop a range from the page cache."""
        os.posix_fadvise(self.file.fileno(), start, whole_pages(nbytes), os.POSIX_FADV_DONTNEED)

    def failed(self, what: str, error: OSError) -> StoreError:
        return StoreError(
            f"the store '{self.text}' could not {what} ({error.strerror or error}), so that this step is "
            "lost: look after the disk, or choose another folder with offload='disk:FOLDER'. The next step "
            "begins anew"
        )


class FileTransfer:
    """A transfer that runs in a thread; only its box refers to the value's memory in that thread."""

    def __init__(
        self, thread: ThreadPoolExecutor, run: Callable[..., None], block: Tensor, start: int
    ) -> None:
        self._process = os.getpid()
        self._box = [block.numpy().data]
        self._future = thread.submit(run, self._box, start)

    def wait(self) -> None:
        self._future.result()

    @property
    def is_done(self) -> bool:
        """The transfer has ended without an error."""
        return self._future.done() and not self._future.cancelled() and self._future.exception() is None

    @property
    def has_failed(self) -> bool:
        return self._future.done() and not self.is_done

    def drop(self) -> None:
        """Keep none of the value's memory live: it is not needed any more."""
        if self._future.cancel():
            self._box.clear()
        elif self._process == os.getpid() and not threading.current_thread().name.startswith(THREADS):
            # a fork has no such thread, and a store's thread that collects garbage must not wait for itself
            self._future.exception()


class _DiskHandle(OffloadHandle):
    start = -1
    """offset in the file, once there is a slot"""
    _writing: FileTransfer | None = None

    def __init__(self, file: _File, value: Tensor) -> None:
        self.layout = Layout.of(value)
        self._file = file
        self.start = file.take(self.layout.nbytes)
        self._value: Tensor | None = value
        self._writing = FileTransfer(file.writer, file.write, bytes_of(value), self.start)

    def free_value(self) -> None:
        assert self._writing is not None
        self.finish(self._writing, "write")
        self._value = None

    def prefetch(self) -> Prefetch:
        if self._file.process != os.getpid():
            raise StoreError(
                f"a value on '{self._file.text}' was written before this process was forked from another: "
                "run the backward pass where the forward pass ran"
            )
        return _DiskPrefetch(self)

    def read(self, block: Tensor) -> FileTransfer:
        return FileTransfer(self._file.reader, self._file.read, block, self.start)

    def finish(self, transfer: FileTransfer, what: str) -> None:
        try:
            transfer.wait()
        except OSError as error:
            raise self._file.failed(f"{what} {size_and_bytes(self.layout.nbytes)}", error) from error

    def __del__(self) -> None:
        if self._writing is not None:
            self._writing.drop()
        if self.start >= 0:
            self._file.slots.give_back(self.start, self.layout.nbytes)


class _DiskPrefetch(Prefetch):
    _handle: _DiskHandle | None = None
    """keeps the slot until the read has ended"""

    def __init__(self, handle: _DiskHandle) -> None:
        self._block = torch.empty(handle.layout.nbytes, dtype=torch.uint8, device="cpu")
        self._reading = handle.read(self._block)
        self._handle = handle

    def wait(self) -> Tensor:
        handle = self._handle
        assert handle is not None
        handle.finish(self._reading, "read")
        self._handle = None
        return handle.layout.over(self._block)

    def __del__(self) -> None:
        if self._handle is not None:
            self._reading.drop()


def _opened(folder: str) -> IO[Any]:
    """A new file without a name in a folder, which is made if missing."""
    if not hasattr(os, "posix_fallocate") or not hasattr(os, "posix_fadvise"):
        raise StoreError("offloading to a disk needs Linux: leave offload out")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=folder, buffering=0)
    except OSError as error:
        raise StoreError(
            f"cannot open a file in the folder '{folder}' to offload to ({error.strerror}): make it "
            "writable, or choose another with offload='disk:FOLDER'"
        ) from error
