"""The differences between devices when an op is measured: the clock, the allocator, the copy speed.

`device_for` gives one class for each kind of device; no other file of the profiler depends on the device.

Page faults. An op that runs alone writes its result to memory that the system has just handed out. Each page
is zeroed and mapped at its first write, which takes several times as long as the write itself. In a step, the
same memory goes from op to op. Which blocks a step takes anew depends on the C library, on small objects
between large blocks, and on earlier work of the process; it changes from step to step (`bench/predicted.py`
counts). So every timed run counts its faults, and their cost is subtracted.

Shortcoming: every fault costs the same here, as much as in a write by all threads.
"""

import contextvars
import mmap
import os
import platform
import resource
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch

from lowtide.errors import LowtideError
from lowtide.generators import generators_kept
from lowtide.profiling.device_clock import SCRATCH_BYTES, DeviceClock
from lowtide.torch_compat.allocation_record import profiler_events
from lowtide.torch_compat.autograd_engine import profiler_is_active
from lowtide.units import format_size

R = TypeVar("R")

SLOW_SECONDS = 0.1
"""Any machine interrupts longer runs now and then, with less effect on their time."""

_WAITED_SHARE = 0.2
"""Share of its time that a slow run may wait for a processor on a machine that is otherwise idle."""
_REST_SECONDS = 0.03

_COPY_BYTES = 64 << 20
_COPY_RUNS = 5
_LEAST_SCRATCH_BYTES = 64 << 10

_AREA_BYTES = 32 << 20
_CHUNK_BYTES = 1 << 20
"""Written within one time slice of a busy machine."""
_ALL_PAGES = 0.9
"""The least share of an area's pages that must fault one by one for their cost to be known."""
_LEAST_SHARE = 1 / 16
"""The least share of a run's time that is not page faults."""


@dataclass(frozen=True, slots=True)
class OpTiming:
    """One run. `seconds` are without the `fault_seconds` that page faults took. `interruptions`: how often
    other processes took the processor. `waited_seconds`: the time in which none of its threads ran."""

    seconds: float
    interruptions: int = 0
    waited_seconds: float = 0.0
    fault_seconds: float = 0.0

    @property
    def whole_seconds(self) -> float:
        """Page faults included."""
        return self.seconds + self.fault_seconds

    @property
    def avoidable(self) -> bool:
        """Whether a repetition could avoid the interruption: the run is short, or it waited for long."""
        if not self.interruptions:
            return False
        return self.whole_seconds < SLOW_SECONDS or self.waited_seconds > _WAITED_SHARE * self.whole_seconds


def typical_seconds(timings: Sequence[OpTiming]) -> float:
    """The median of the undisturbed runs; on a machine too busy for any, the fastest.

    An interruption only ever makes a run longer, several times so where threads wait for each other.
    """
    undisturbed = [timing.seconds for timing in timings if not timing.interruptions]
    return statistics.median(undisturbed) if undisturbed else min(timing.seconds for timing in timings)


def spread_seconds(timings: Sequence[OpTiming]) -> float:
    """Distance between the quartiles, without short runs that were interrupted; 0 for fewer than two."""
    runs = [timing.seconds for timing in timings if not timing.avoidable]
    if len(runs) < 2:
        return 0.0
    low, _, high = statistics.quantiles(runs, n=4, method="inclusive")
    return high - low


def rest_after(timing: OpTiming) -> None:
    """Pause after an interrupted run: a process that used less than its share is then left alone."""
    if timing.avoidable:
        time.sleep(_REST_SECONDS)


class Device(ABC):
    """A clock and an allocator that can be read."""

    torch_device: torch.device
    keeps_after_first_run = False
    """Whether the first run of an op leaves bytes live that later runs reuse, as with cuBLAS and cuDNN."""
    caches_blocks = False
    """Whether torch's caching allocator cuts the device's memory into blocks."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Text that changes when earlier times are no longer valid."""

    @abstractmethod
    def timed(self, run: Callable[[], R]) -> tuple[R, OpTiming]:
        """The result of `run` and its time, including all its work on the device."""

    def timed_in_own_memory(self, run: Callable[[], R]) -> tuple[R, OpTiming]:
        """As `timed`, without the time to get memory from the system: a step has its memory already."""
        return self.timed(run)

    @abstractmethod
    def measured(self, run: Callable[[], R]) -> tuple[R, int]:
        """The result of `run` and its peak: the most bytes live during it above those live before."""

    def peak_and_op(self, run: Callable[[], object]) -> tuple[int, str]:
        """The peak of `run` and the op that ran at it; empty where only the allocator counts."""
        return self.measured(run)[1], ""

    def next_peak_bytes(self) -> int | None:
        """The most live bytes since the counter was last reset, which this resets; None for the processor."""
        return None

    def reserved_peak_bytes(self) -> int | None:
        """The most that the device's allocator has reserved; None for the processor, whose has no cache."""
        return None

    def free_bytes(self) -> int | None:
        """Free memory of the device itself; None for the processor, whose memory is the machine's."""
        return None

    def usable_bytes(self) -> int | None:
        """Free memory that this process can still fill: with what its allocator has cached; None for the
        processor."""
        return None

    def live_bytes(self) -> int | None:
        """Bytes of all blocks that the device's allocator has in use; None for the processor."""
        return None

    @cache  # noqa: B019  one instance per device for the whole process
    def copy_bytes_per_second(self) -> float:
        """Measured speed of copies to host memory, which is pinned for an accelerator."""
        source = self.scratch(_COPY_BYTES)
        target = torch.ones(len(source), dtype=torch.uint8, pin_memory=self.torch_device.type != "cpu")
        copies = [self.timed(lambda: target.copy_(source, non_blocking=True))[1] for _ in range(_COPY_RUNS)]
        return len(source) / typical_seconds(copies)

    def scratch(self, most_bytes: int, *, times: int = 1) -> torch.Tensor:
        """As many bytes of 1 as the device has room for `times` over, at most `most_bytes`."""
        nbytes = most_bytes
        while True:
            try:
                blocks = [
                    torch.ones(nbytes, dtype=torch.uint8, device=self.torch_device) for _ in range(times)
                ]
                return blocks[0]
            except torch.OutOfMemoryError as error:
                if nbytes <= _LEAST_SCRATCH_BYTES:
                    raise LowtideError(
                        f"the device {self.torch_device} is full: not even {format_size(nbytes)} are free to "
                        "measure with. Free what other tensors and programs have there, and profile again"
                    ) from error
                nbytes //= 2

    def within_free(self, limit_bytes: int) -> int:
        """As much of a memory limit as the device has free; all of it on the processor, whose memory the
        limit is for."""
        return limit_bytes

    def kept_rng(self) -> AbstractContextManager[None]:
        """Restores the states of the device's generator and of the CPU's afterwards."""
        return generators_kept([self.torch_device])


class Cpu(Device):
    """The processor; torch's older profiler sees its allocator."""

    torch_device = torch.device("cpu")

    @property
    def identity(self) -> str:
        cores, threads = os.cpu_count() or 1, torch.get_num_threads()
        return f"{_cpu_model()}, {_number(cores, 'core')}, {_number(threads, 'thread')}"

    def timed(self, run: Callable[[], R]) -> tuple[R, OpTiming]:
        before, worked, start = _interruptions(), time.process_time(), time.perf_counter()
        result = run()
        seconds = time.perf_counter() - start
        waited_seconds = max(0.0, seconds - (time.process_time() - worked))
        return result, OpTiming(seconds, _interruptions() - before, waited_seconds)

    def timed_in_own_memory(self, run: Callable[[], R]) -> tuple[R, OpTiming]:
        fault_seconds, before = page_fault_seconds(), page_faults()
        result, timing = self.timed(run)
        seconds = without_faults(timing.seconds, page_faults() - before, fault_seconds=fault_seconds)
        return result, replace(timing, seconds=seconds, fault_seconds=timing.seconds - seconds)

    def measured(self, run: Callable[[], R]) -> tuple[R, int]:
        result, events = _recorded(run)
        return result, peak_of(events)[0]

    def peak_and_op(self, run: Callable[[], object]) -> tuple[int, str]:
        peak_bytes, names = peak_of(_recorded(run)[1])
        op = next((name for name in names if "::" in name and not name.startswith("autograd::")), "")
        around = [name for name in names if "Backward" in name and "::" not in name]
        around += [name.partition("#")[2] for name in names if name.startswith("Optimizer.step#")]
        return peak_bytes, " in ".join(filter(None, (op, *around[:1])))


class Accelerator(Device):
    """Any accelerator of torch (CUDA, ROCm, XPU, MPS, a device of one's own), by `torch.accelerator` alone.

    `torch_device` may have no index: then it is the current device at each call.
    """

    keeps_after_first_run = True
    caches_blocks = True

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._clock = DeviceClock(torch_device.type)

    @property
    def identity(self) -> str:
        module = torch.get_device_module(self.torch_device)
        name = module.get_device_name(self.torch_device) if hasattr(module, "get_device_name") else ""
        versions = [getattr(torch.version, key, None) for key in ("cuda", "hip", "xpu")]
        return ", ".join(filter(None, (name, self.torch_device.type, *versions)))

    def timed(self, run: Callable[[], R]) -> tuple[R, OpTiming]:
        with torch.accelerator.device_index(self.index):
            result, seconds = self._clock.time(run)
        return result, OpTiming(seconds)

    def measured(self, run: Callable[[], R]) -> tuple[R, int]:
        torch.accelerator.synchronize(self.index)
        torch.accelerator.reset_peak_memory_stats(self.index)
        before = torch.accelerator.memory_allocated(self.index)
        result = run()
        torch.accelerator.synchronize(self.index)
        return result, torch.accelerator.max_memory_allocated(self.index) - before

    def next_peak_bytes(self) -> int | None:
        peak_bytes = torch.accelerator.max_memory_allocated(self.index)
        torch.accelerator.reset_peak_memory_stats(self.index)
        return peak_bytes

    def reserved_peak_bytes(self) -> int | None:
        return torch.accelerator.max_memory_reserved(self.index)

    def free_bytes(self) -> int:
        return torch.accelerator.get_memory_info(self.index)[0]

    def usable_bytes(self) -> int:
        return self.free_bytes() + torch.accelerator.memory_reserved(self.index) - self.live_bytes()

    def live_bytes(self) -> int:
        return torch.accelerator.memory_allocated(self.index)

    def within_free(self, limit_bytes: int) -> int:
        return max(0, min(limit_bytes, self.usable_bytes() - SCRATCH_BYTES))

    @property
    def index(self) -> int:
        index = self.torch_device.index
        return torch.accelerator.current_device_index() if index is None else index


@cache
def device_for(torch_device: torch.device) -> Device:
    """How to measure on `torch_device`."""
    if torch_device.type == "cpu":
        return Cpu()
    present = torch.accelerator.current_accelerator(check_available=True)
    if present is None or present.type != torch_device.type:
        here = "the CPU alone" if present is None else f"the CPU and {present.type}"
        raise ValueError(f"no way to measure on device '{torch_device}': this machine has {here}")
    return Accelerator(torch_device)


def outside_profiler(run: Callable[[], R]) -> R:
    """`run()`, in a thread of its own where torch.profiler is active in this one.

    A thread has its own profiler: the user's trace gets no op of lowtide, and no time includes the cost of
    the profiler.
    """
    return in_new_thread(run) if profiler_is_active() else run()


def in_new_thread(run: Callable[[], R]) -> R:
    """`run()` in a thread of its own, with the context and the current device of this one."""
    context, index = contextvars.copy_context(), torch.accelerator.current_device_index

    def in_thread(device_index: int | None) -> R:
        if device_index is not None:
            torch.accelerator.set_device_index(device_index)
        return context.run(run)

    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(in_thread, index() if torch.accelerator.is_available() else None).result()


def _recorded(run: Callable[[], R]) -> tuple[R, list[list[Any]]]:
    if profiler_is_active():
        raise LowtideError(
            "memory cannot be measured inside a block of torch.profiler: measure before or after the block"
        )
    return profiler_events(run)


def peak_of(threads: Sequence[Sequence[Any]]) -> tuple[int, list[str]]:
    """The most bytes live at once, at least 0, and the ops that were running then, outermost first.

    `threads`: events of torch's older profiler, in order of time for each thread.
    """
    live = peak = 0
    running: dict[int, list[str]] = {}
    names: list[str] = []
    for event in sorted(chain(*threads), key=lambda event: event.start_us()):
        stack = running.setdefault(event.thread_id(), [])
        match event.kind():
            case "push":
                stack.append(event.name())
            case "pop":
                stack.pop()
            case "memory_alloc":
                live += event.cpu_memory_usage()
                if live > peak:
                    peak, names = live, [name for stack in running.values() for name in stack]
    return peak, names


def page_faults() -> int:
    """Pages that this process was given so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def without_faults(seconds: float, num_faults: int, *, fault_seconds: float) -> float:
    """The time of the same run without page faults."""
    return max(seconds * _LEAST_SHARE, seconds - num_faults * fault_seconds)


@cache
def page_fault_seconds() -> float:
    """The time that one fault adds to a write; 0 where the system maps several pages per fault: then the
    count of faults says nothing about bytes."""
    with mmap.mmap(-1, _AREA_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        before = page_faults()
        first = _chunk_seconds(area)
        count = page_faults() - before
        again = _chunk_seconds(area)
    if count < _ALL_PAGES * _AREA_BYTES / mmap.PAGESIZE:
        return 0.0
    return max(0.0, first - again) * mmap.PAGESIZE / _CHUNK_BYTES


def _chunk_seconds(area: mmap.mmap) -> float:
    """The median time to write one chunk; a separate function, since no tensor may outlive the area."""
    seconds = []
    for chunk in torch.frombuffer(area, dtype=torch.uint8).view(-1, _CHUNK_BYTES).unbind():
        start = time.perf_counter()
        chunk.fill_(1)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _interruptions() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


@cache
def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
