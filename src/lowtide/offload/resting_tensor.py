"""Tensors that rest on a store between their uses: optimizer state, and weights.

A resting tensor stays the user's object and can be read and written at any time. Only its bytes are
elsewhere: on the disk, where its storage is a shared mapping of its slot in the store's file; or in pinned
memory of the host. Compute does not touch the storage. It copies the bytes into memory of torch, and back:

    state["exp_avg"]    rests ......................................................... rests
    block of torch            [read rows 0-63][compute][write rows 0-63] freed

So live bytes are those of blocks. A mapping's pages are in the page cache, which is the system's memory.
"""

import mmap
import os
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowtide.errors import StoreError
from lowtide.offload.offload_store import Layout, RestingTensor, RestingTransfer
from lowtide.units import size_and_bytes

if TYPE_CHECKING:
    from lowtide.offload.disk_store import _File


class _Mapping(mmap.mmap):
    """A slot of a file, mapped. The slot is free once no tensor and no resting tensor refers to it."""


class DiskRestingTensor(RestingTensor):
    """Space for a tensor of this layout; its values are written by `start_write`."""

    def __init__(self, file: "_File", layout: Layout, name: str) -> None:
        self.layout, self.name = layout, name
        self._writes: list[tuple[int, int, _DiskRestingTransfer]] = []
        self.file = file
        self.start = file.take(layout.nbytes)
        try:
            self._mapping = _Mapping(file.file.fileno(), layout.nbytes, offset=self.start)
        except BaseException:
            file.slots.give_back(self.start, layout.nbytes)
            raise
        weakref.finalize(self._mapping, file.slots.give_back, self.start, layout.nbytes).atexit = False
        self.found_at(self.value().data_ptr())

    def value(self) -> Tensor:
        return self.layout.over(torch.frombuffer(self._mapping, dtype=torch.uint8))

    def start_read(self, target: Tensor, start: int = 0) -> RestingTransfer:
        self._check(start, len(target))
        self._finish_writes(start, start + len(target))
        return _DiskRestingTransfer(self, target, start, is_write=False)

    def start_write(self, source: Tensor, start: int = 0) -> RestingTransfer:
        self._check(start, len(source))
        self._finish_writes(start, start + len(source))
        writing = _DiskRestingTransfer(self, source, start, is_write=True)
        self._writes.append((start, start + len(source), writing))
        return writing

    def _finish_writes(self, start: int, end: int) -> None:
        """Wait for earlier writes of these bytes."""
        self._writes = [write for write in self._writes if not write[2].is_done]
        for first, last, writing in self._writes:
            if first < end and start < last:
                writing.wait()

    def take_as_whole(self) -> None:
        super().take_as_whole()
        self._writes = [write for write in self._writes if not write[2].has_failed]

    def drop_pages(self) -> None:
        self._mapping.madvise(mmap.MADV_DONTNEED)
        self.file.forget_pages(self.start, self.layout.nbytes)

    def _check(self, start: int, nbytes: int) -> None:
        assert start >= 0 and start + nbytes <= self.layout.nbytes
        if self.file.process != os.getpid():
            raise StoreError(
                f"'{self.name}' rests on '{self.file.text}' for the process that this one was forked from: "
                "train where the plan was applied"
            )
        if self.is_torn:
            raise StoreError(
                f"'{self.name}' was not written whole to '{self.file.text}' in an earlier step: load your "
                "last checkpoint before you go on"
            )


class _DiskRestingTransfer(RestingTransfer):
    def __init__(self, resting: DiskRestingTensor, block: Tensor, start: int, *, is_write: bool) -> None:
        from lowtide.offload.disk_store import FileTransfer

        file = resting.file
        self._resting, self._is_write, self._nbytes = resting, is_write, len(block)
        thread, run = (file.writer, file.write) if is_write else (file.reader, file.read)
        self._running = FileTransfer(thread, run, block, resting.start + start)

    def wait(self) -> None:
        try:
            self._running.wait()
        except OSError as error:
            self._resting.is_torn |= self._is_write
            what = "write" if self._is_write else "read"
            raise StoreError(
                f"the store '{self._resting.file.text}' could not {what} {size_and_bytes(self._nbytes)} of "
                f"'{self._resting.name}' ({error.strerror or error}): look after the disk, and load your "
                "last checkpoint before you go on"
            ) from error

    @property
    def is_done(self) -> bool:
        return self._running.is_done

    @property
    def has_failed(self) -> bool:
        return self._running.has_failed

    def drop(self) -> None:
        self._running.drop()
