"""The interface of an offload store, how to open one, and the four ops by which graphs use one.

    forward graph                                  backward graph

    value ── start_offload ── finish_offload ─┄┄── start_prefetch ── finish_prefetch ── value
                  (write)      frees the value        (read)          before its first reader

Writes and reads run beside the caller, writes in their order and reads in theirs. Transfers take only the
memory of the value and of its prefetched copy; the caller's own calls make and free both. So the speed of a
store changes no byte of a step's memory.

Autograd passes only tensors from the forward to the backward pass. So a tensor of one number represents the
`OffloadHandle`, and the memory of this tensor refers to the handle. Where autograd frees the tensor, as after
a step without backward pass, the store gets the space back.
"""

import itertools
import logging
import os
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from lowtide.errors import StoreError
from lowtide.facts.plan import OffloadTarget
from lowtide.torch_compat.autograd_engine import version_of

logger = logging.getLogger("lowtide")

MOUNTS = Path("/proc/self/mounts")
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


@dataclass(frozen=True, slots=True)
class Layout:
    """Dtype, shape and strides of a tensor, and the `nbytes` of its whole storage."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    nbytes: int

    @classmethod
    def of(cls, value: Tensor) -> Self:
        nbytes = value.untyped_storage().nbytes()
        return cls(value.dtype, tuple(value.shape), value.stride(), int(value.storage_offset()), nbytes)

    def over(self, block: Tensor) -> Tensor:
        """The tensor of this layout whose storage is that of `block`."""
        empty = torch.empty(0, dtype=self.dtype, device=block.device)
        return empty.set_(block.untyped_storage(), self.offset, self.shape, self.strides)


def bytes_of(value: Tensor) -> Tensor:
    """All bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())


class Prefetch(ABC):
    """A read that has started, into memory that is allocated already."""

    @abstractmethod
    def wait(self) -> Tensor:
        """The value, once the read has ended; `StoreError` where the read failed."""


class OffloadHandle(ABC):
    """An offloaded value. The store gets its space back when no reference to the handle is left."""

    @abstractmethod
    def free_value(self) -> None:
        """Wait for the write, then free the value in device memory; `StoreError` where the write failed."""

    @abstractmethod
    def prefetch(self) -> Prefetch:
        """Allocate memory for the value and start to read into it."""


class RestingTransfer(ABC):
    """A copy between a block of torch's memory and a resting tensor, which has started."""

    @abstractmethod
    def wait(self) -> None:
        """The copy has ended, and the block may be used for something else; `StoreError` where it failed."""

    @abstractmethod
    def drop(self) -> None:
        """Wait for the copy, or cancel it; its result is not needed, and no error is raised."""


class RestingTensor(ABC):
    """A tensor of the user whose bytes are on a store. `name` is for messages; `is_torn`: a write failed, so
    that its values are no longer those of one step. `torn_at`: the version of the user's object then."""

    layout: Layout
    name: str
    is_torn = False
    torn_at = -1
    address = 0
    """where the user's object has its bytes while it rests"""

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    @abstractmethod
    def start_read(self, target: Tensor, start: int = 0) -> RestingTransfer:
        """Begin to copy bytes from `start` on into `target`: bytes (uint8) of the step's device."""

    @abstractmethod
    def start_write(self, source: Tensor, start: int = 0) -> RestingTransfer:
        """Begin to write bytes back; `source` must not change until the transfer has ended."""

    @abstractmethod
    def value(self) -> Tensor:
        """A tensor with the bytes on the store: what the user's object becomes."""

    def found_at(self, address: int) -> None:
        """Let `resting_of` find the tensor whose bytes are at `address`."""
        self.address = address
        _RESTING[address] = self

    def drop_pages(self) -> None:  # noqa: B027  only a mapping has pages
        """Let the system have the memory back that reads of the user's object took."""

    def is_of(self, tensor: Tensor) -> bool:
        """Whether `tensor` still has its bytes here; not where the user gave it others."""
        return tensor.untyped_storage().data_ptr() == self.address

    def note_torn(self, tensor: Tensor) -> None:
        """A step has failed, which may have torn this tensor, the user's object."""
        if self.is_torn:
            self.torn_at = version_of(tensor)

    def look_after(self, tensor: Tensor) -> None:
        """Whole again where `tensor`, the user's object, was written since it was torn, as by
        `load_state_dict`."""
        if self.is_torn and self.torn_at >= 0 and version_of(tensor) != self.torn_at:
            self.take_as_whole()

    def take_as_whole(self) -> None:
        """The values on the store are good, or it does not matter what they are."""
        self.is_torn, self.torn_at = False, -1

    def return_to_memory(self, tensor: Tensor, device: torch.device) -> None:
        """Give `tensor` ordinary memory again."""
        self.look_after(tensor)
        if self.is_torn:
            logger.warning(
                "'%s' was not written whole to the store in an earlier step, and returns to memory as it is: "
                "load your last checkpoint before you go on",
                self.name,
            )
            self.take_as_whole()
        block = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self.start_read(block).wait()
        tensor.data = self.layout.over(block)


class OffloadStore(ABC):
    """Where values are offloaded to; `text` is the user's name for it, as in `disk:/scratch`."""

    text: str

    @abstractmethod
    def reserve(self, nbytes: int) -> None:
        """Have space for `nbytes` in all; `StoreError` where there is less."""

    @abstractmethod
    def offload(self, value: Tensor) -> OffloadHandle:
        """Start to write a value, which must not change until `free_value`."""

    @abstractmethod
    def make_resting(self, layout: Layout, name: str, device: torch.device) -> RestingTensor:
        """A resting tensor for a step on `device`, of any values, which takes no memory there."""

    def rest(self, tensor: Tensor, name: str) -> RestingTensor:
        """Write a tensor and free its memory; the object stays valid, with its bytes on the store. Nothing
        has changed where this raises `StoreError`."""
        resting = self.make_resting(Layout.of(tensor), name, tensor.device)
        resting.start_write(bytes_of(tensor)).wait()
        tensor.data = resting.value()
        return resting


_RESTING: "weakref.WeakValueDictionary[int, RestingTensor]" = weakref.WeakValueDictionary()


def resting_of(tensor: Tensor) -> RestingTensor | None:
    """Where a tensor rests, by the bytes that it has now; None for a tensor in ordinary memory."""
    return _RESTING.get(tensor.untyped_storage().data_ptr()) if _RESTING else None


def open_store(target: OffloadTarget, device: str) -> OffloadStore:
    """Open the store `target` for a model on `device`; `StoreError` where that is impossible."""
    from lowtide.offload.disk_store import DiskStore
    from lowtide.offload.host_store import HostStore

    on_cpu = device.partition(":")[0] == "cpu"
    if target.kind == "disk" and on_cpu:
        return DiskStore(target.folder)
    if target.kind == "host" and not on_cpu:
        return HostStore()
    raise StoreError(
        f"offload='{target}' is for a model on {'an accelerator' if on_cpu else 'the CPU'}, and this one is "
        f"on {device}: write offload={'disk:FOLDER' if on_cpu else 'host'!r}"
    )


def warn_if_in_memory(target: OffloadTarget) -> None:
    """Warn where the folder of a disk store is in a file system that is kept in memory."""
    if target.kind == "disk" and (kind := _file_system(target.folder)) in IN_MEMORY:
        logger.warning(
            "the folder '%s' is in memory (%s), so that offloaded values take as much memory as "
            "before: choose a folder on a disk",
            target.folder,
            kind,
        )


def _file_system(folder: str) -> str:
    """The type of a folder's file system; empty where the system has no list of mounts."""
    if not MOUNTS.exists():
        return ""
    rows = [line.split() for line in MOUNTS.read_text().splitlines()]
    path = Path(os.path.realpath(folder))
    # of two mounts at one path, the later hides the earlier
    found = [(len(row[1]), i, row[2]) for i, row in enumerate(rows) if path.is_relative_to(row[1])]
    return max(found, default=(0, 0, ""))[2]


_NUMBERS = itertools.count(1)
_STORES: "weakref.WeakValueDictionary[int, OffloadStore]" = weakref.WeakValueDictionary()
_HANDLES: "weakref.WeakValueDictionary[int, OffloadHandle]" = weakref.WeakValueDictionary()


class _HandleMemory(bytearray):
    """The memory of the tensor that represents a handle."""

    handle: OffloadHandle


def store_number(store: OffloadStore) -> int:
    """The number by which graphs name an open store; a graph does not keep the store open."""
    known = next((number for number, other in _STORES.items() if other is store), None)
    number = known if known is not None else next(_NUMBERS)
    _STORES[number] = store
    return number


def start_offload(number: int, value: Tensor) -> OffloadHandle:
    """Start to write a value to the store of this number; an op of forward graphs."""
    return _STORES[number].offload(value)


def finish_offload(handle: OffloadHandle) -> Tensor:
    """Free an offloaded value once it is written; the result represents its handle in the backward pass."""
    handle.free_value()
    number = next(_NUMBERS)
    memory = _HandleMemory(number.to_bytes(8, "little"))
    memory.handle = _HANDLES[number] = handle
    return torch.frombuffer(memory, dtype=torch.int64)


def start_prefetch(handle_tensor: Tensor) -> Prefetch:
    """Start to read a value back; an op of backward graphs."""
    handle = _HANDLES.get(int(handle_tensor))
    if handle is None:
        raise StoreError(
            "an offloaded value is gone, since something copied the tensor that stands for it, as "
            "saved-tensor hooks do (torch.autograd.graph.save_on_cpu): leave such hooks out, or plan without "
            "offload"
        )
    return handle.prefetch()


def finish_prefetch(prefetch: Prefetch) -> Tensor:
    """Wait for a value, right before its first reader."""
    return prefetch.wait()
