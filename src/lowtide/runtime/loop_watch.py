"""Measure the bytes that the user's loop makes between a forward and a backward pass: the loss, most of all.

    output = model(batch)        the watch begins
    loss = loss_fn(output)       the loss is measured
    loss.backward()              its backward pass is measured; the watch ends at the planned graph

The allocator tells: on the CPU through a record of its blocks, on an accelerator by its counters of live
bytes and of their peak, which the watch resets. The loop's ops run as without the watch. A watch is over when
`backward()` returns or raises, when the output dies, when a planned model is called again, or when a profiler
begins, whichever comes first.
"""

import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from lowtide.garbage import set_aside
from lowtide.ops.device_memory import CPU, block_bytes
from lowtide.torch_compat import autograd_engine
from lowtide.torch_compat.allocation_record import AllocationRecord
from lowtide.torch_compat.dispatch import WeakStorages, storages_of
from lowtide.trace.model_call import tensors_in


class LiveLoss(NamedTuple):
    """Bytes that a loop made: their peak, and the bytes live when the planned backward pass began, for a call
    with `batch_bytes`."""

    peak_bytes: int
    kept_bytes: int
    batch_bytes: int = 0


class LoopWatch:
    """Measures one step of a loop on `device`. `loss` is set when the watch is over, where it saw a planned
    backward pass begin. `may_keep_outputs`: the plan counts the outputs as live through the backward pass."""

    def __init__(
        self, batch_bytes: int = 0, device: torch.device = CPU, *, may_keep_outputs: bool = False
    ) -> None:
        self.batch_bytes = batch_bytes
        self.device = device
        self.loss: LiveLoss | None = None
        self.losses = WeakStorages(())
        """what the backward pass began with"""
        self._meter: _Meter
        if device == CPU:
            self._meter = _Blocks(self, may_keep_outputs=may_keep_outputs)
        else:
            self._meter = _Counters(device)
        self._arrived_bytes: int | None = None
        self._output: Any = None
        self._release: Callable[[], object] = lambda: None

    def begin(self, output: Any) -> bool:
        """Watch what is made of `output`; False where no backward pass can come, or nothing can be measured:
        inside of a backward pass, and on the CPU under a profiler."""
        leave()
        node = node_behind(output)
        if node is None or not self._meter.begin(output):
            return False
        self._output = weakref.ref(node, lambda _: self._break_off())
        _THREAD.watch = self
        self._release = _AFTER_BACKWARD.hold(self)
        return True

    def end(self, arrived: Sequence[torch.Tensor]) -> None:
        """The planned backward pass begins, with gradients that are the graph's from now on."""
        if self._arrived_bytes is None:
            self._arrived_bytes = sum(block_bytes(self.device, tensor, tensor.nbytes) for tensor in arrived)
            self._meter.mark()

    @property
    def has_ended(self) -> bool:
        return self._arrived_bytes is not None

    def leave(self) -> None:
        """Read what was measured, and measure no more. Not inside of a backward pass."""
        if not self._meter.can_read:
            return
        found = self._meter.read()
        if found is not None and self._arrived_bytes is not None:
            peak_bytes, live_bytes = found
            kept_bytes = max(0, live_bytes - self._arrived_bytes)
            self.loss = LiveLoss(max(0, peak_bytes), kept_bytes, self.batch_bytes)
        self._release()
        if _THREAD.watch is self:
            _THREAD.watch = None

    def _break_off(self) -> None:
        """The output died without a backward pass."""
        if not self.has_ended:
            self.leave()


class _Meter(ABC):
    """Measures the bytes that are made from `begin` to `mark`."""

    @abstractmethod
    def begin(self, output: Any) -> bool:
        """False where nothing can be measured."""

    @abstractmethod
    def mark(self) -> None:
        """The measured time ends."""

    @property
    @abstractmethod
    def can_read(self) -> bool:
        """Whether `read` can be called here and now."""

    @abstractmethod
    def read(self) -> tuple[int, int] | None:
        """The peak of the bytes made, and how many of them are live at the mark; None where the mark was not
        seen, as in a backward pass of another thread."""


class _Blocks(_Meter):
    """The blocks of the CPU's allocator in one thread. The outputs' memory stays until the end where it may:
    the record would not know the size of these blocks, which most loops drop while it is on."""

    def __init__(self, watch: LoopWatch, *, may_keep_outputs: bool) -> None:
        watched = weakref.ref(watch)
        self._may_keep_outputs = may_keep_outputs
        self._outputs: list[torch.UntypedStorage] = []
        self._bring_back: Callable[[], None] = lambda: None
        self._record = AllocationRecord(on_interruption=lambda: _leave(watched()))

    def begin(self, output: Any) -> bool:
        if not self._record.start():
            return False
        self._bring_back = set_aside()  # the record would not know the blocks that older garbage frees
        if self._may_keep_outputs:
            self._outputs = storages_of(tensors_in(output))
        return True

    def mark(self) -> None:
        self._record.mark()

    @property
    def can_read(self) -> bool:
        return self._record.can_stop

    def read(self) -> tuple[int, int] | None:
        sizes, self._outputs = self._record.stop(), []
        self._bring_back()
        return live_blocks(sizes)


def live_blocks(sizes: Iterable[int | None]) -> tuple[int, int] | None:
    """The peak of the blocks that are allocated before the mark, and the bytes that are live there; None
    without a mark.

        [100, 40, -40, -7, None, -100]      peak 140, live at the mark 100

    A freed block is known by its size alone. A size that no live block has is that of an older block, and
    does not count. Shortcoming: torch remembers sizes by address, also those of blocks long gone. An older
    block that is freed now may have any such size, and counts as a block of this record where one has it.
    """
    live = Counter[int]()
    live_bytes = peak_bytes = 0
    for nbytes in sizes:
        if nbytes is None:
            return peak_bytes, live_bytes
        if nbytes > 0 or live[-nbytes] > 0:
            live[abs(nbytes)] += 1 if nbytes > 0 else -1
            live_bytes += nbytes
            peak_bytes = max(peak_bytes, live_bytes)
    return None


class _Counters(_Meter):
    """The counters of an accelerator's allocator, for all threads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before_bytes = 0
        self._found: tuple[int, int] | None = None

    def begin(self, output: Any) -> bool:
        if autograd_engine.in_backward():
            return False
        self._before_bytes = torch.accelerator.memory_allocated(self._device)
        torch.accelerator.reset_peak_memory_stats(self._device)
        self._outputs = WeakStorages(tensors_in(output))
        return True

    def mark(self) -> None:
        live_bytes = torch.accelerator.memory_allocated(self._device) - self._before_bytes
        peak_bytes = torch.accelerator.max_memory_allocated(self._device) - self._before_bytes
        # outputs that have died leave as many bytes to the loop. Whether they died before the peak is not
        # known: a plan counts them as live there, so that its own peak is right in both cases
        live_bytes += self._outputs.freed_bytes()
        self._found = (max(peak_bytes, live_bytes), live_bytes)

    @property
    def can_read(self) -> bool:
        return True

    def read(self) -> tuple[int, int] | None:
        return self._found


class _OfThread(threading.local):
    """The watch of a thread that is on."""

    watch: LoopWatch | None = None


_THREAD = _OfThread()


def leave() -> None:
    """End the watch of an earlier step of this thread."""
    _leave(_THREAD.watch)


def _leave(watch: LoopWatch | None) -> None:
    if watch is not None:
        watch.leave()


def _leave_after_backward(outputs: Sequence[Any]) -> None:
    """Leave after the watched backward pass, of `outputs`; after any other, the watch goes on."""
    watch = _THREAD.watch
    if watch is not None and watch.has_ended:
        watch.losses.add(WeakStorages(each for each in outputs if isinstance(each, torch.Tensor)))
        watch.leave()


_AFTER_BACKWARD = autograd_engine.after_backward(_leave_after_backward)


def node_behind(output: Any) -> Any:
    """The first node of autograd behind an output that can be referred to weakly: a graph's node. None where
    there is none."""
    node: Any = next((tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None), None)
    while node is not None:
        try:
            weakref.ref(node)
        except TypeError:  # autograd's own node; the node of a graph is behind it
            node = node.next_functions[0][0] if node.next_functions else None
        else:
            return node
    return None


def weakly(value: Any) -> Callable[[], Any]:
    """A weak reference; to nothing where `value` is None."""
    return (lambda: None) if value is None else weakref.ref(value)
