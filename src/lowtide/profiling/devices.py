"""Page faults: what taking memory from the system anew costs, and time without it.

An op that is run alone gets its result in memory that the system has just handed out, where that is large:
each page of it is zeroed and mapped at its first write, which takes several times as long as writing it. In a
step the same memory goes from op to op. Which blocks a step takes anew depends on the C library, on small
objects that happen to lie between large blocks, and on what the process did before; it changes from step to
step (`bench/predicted.py` counts). So that costs are of the op alone, faults are counted in every timed run
and taken off at what one costs here.

Shortcomings: a fault is taken to cost the same in every op, and as much as in a write by all threads.

What differs between devices when an op is measured: the clock, the memory inside, the copy speed.

`device_for` is the seam; the rest of the profiler never asks where it runs.
"""

import mmap
import os
import platform
import resource
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

_AREA_BYTES = 32 << 20
_PIECE_BYTES = 1 << 20
"""Written in less time than a busy machine lets a process run at a time."""

_ALL_PAGES = 0.9
"""Of the pages of an area that is written, how many have to fault one by one for their cost to be known."""

_LEAST_SHARE = 1 / 16
"""Of a run's time that is left at least: faults never were all that an op did."""


def page_faults() -> int:
    """Pages that this process was given so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def without_faults(seconds: float, num_faults: int, *, fault_seconds: float) -> float:
    """What a run would have taken in memory that was there before."""
    return max(seconds * _LEAST_SHARE, seconds - num_faults * fault_seconds)


@cache
def page_fault_seconds() -> float:
    """What one fault adds to a write; 0 where the system gives pages in larger lots, whose number does
    not tell how much memory came."""
    with mmap.mmap(-1, _AREA_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        before = page_faults()
        first = _piece_seconds(area)
        count = page_faults() - before
        again = _piece_seconds(area)
    if count < _ALL_PAGES * _AREA_BYTES / mmap.PAGESIZE:
        return 0.0
    return max(0.0, first - again) * mmap.PAGESIZE / _PIECE_BYTES


def _piece_seconds(area: mmap.mmap) -> float:
    """What it takes to write to one piece of an area; a function of its own, since nothing may look at an
    area that is closed."""
    seconds = []
    for piece in torch.frombuffer(area, dtype=torch.uint8).view(-1, _PIECE_BYTES).unbind():
        start = time.perf_counter()
        piece.fill_(1)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


_COPY_BYTES = 64 << 20
_COPY_RUNS = 5
_REST_SECONDS = 0.03

SLOW_SECONDS = 0.1
"""What takes longer is interrupted now and then on any machine, and is hurt less by it."""

_WAITED_SHARE = 0.2
"""Of a run's time, how much a slow one may wait for a processor on a machine that is idle but for it."""


@dataclass(frozen=True, slots=True)
class OpTiming:
    """One run: how long it took, how often other processes took the processor away meanwhile, how long
    none of its threads ran, and what was taken off for page faults."""

    seconds: float
    interruptions: int = 0
    waited_seconds: float = 0.0
    fault_seconds: float = 0.0

    @property
    def whole_seconds(self) -> float:
        """As the clock saw it."""
        return self.seconds + self.fault_seconds

    @property
    def avoidable(self) -> bool:
        """Whether it was interrupted although it is short enough to run in one piece, or for so long that its
        time is that of others."""
        if not self.interruptions:
            return False
        return self.whole_seconds < SLOW_SECONDS or self.waited_seconds > _WAITED_SHARE * self.whole_seconds


def typical_seconds(timings: Sequence[OpTiming]) -> float:
    """The median of the undisturbed runs; on a machine too busy for any, the fastest.

    Being interrupted only ever makes a run longer, several times so where threads wait for each other.
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
    """Pause after an interrupted run: who used less than its share is then left alone for a while."""
    if timing.avoidable:
        time.sleep(_REST_SECONDS)


class Device(ABC):
    """A clock and an allocator that can be read."""

    torch_device: torch.device

    @property
    @abstractmethod
    def identity(self) -> str:
        """Text that changes when times measured before no longer hold."""

    @abstractmethod
    def timed(self, run: Callable[[], Any]) -> tuple[Any, OpTiming]:
        """The result of `run` and how long it took, all its work on the device included."""

    def timed_in_own_memory(self, run: Callable[[], Any]) -> tuple[Any, OpTiming]:
        """As `timed`, without what it takes to get memory from the system: a step has it already."""
        return self.timed(run)

    @abstractmethod
    def measured(self, run: Callable[[], Any]) -> tuple[Any, int]:
        """The result of `run` and the most bytes held during it above those held before."""

    @property
    def keeps_after_first_run(self) -> bool:
        """Whether the first run of an op leaves bytes behind that no later one takes, as cuBLAS and cuDNN
        do with what belongs to their handles."""
        return False

    @abstractmethod
    def copy_bytes_per_second(self) -> float:
        """Measured speed of moving bytes out to host memory; a plain copy where that is the device."""

    def kept_rng(self) -> AbstractContextManager[None]:
        """Leaves the global random state as it was, whatever runs inside."""
        devices = [self.torch_device] if self.torch_device.type == "cuda" else []
        return torch.random.fork_rng(devices=devices)


class Cpu(Device):
    """The processor; the allocator is read through the memory events of torch's profiler."""

    torch_device = torch.device("cpu")

    @property
    def identity(self) -> str:
        cores, threads = os.cpu_count() or 1, torch.get_num_threads()
        return f"{_cpu_model()}, {_number(cores, 'core')}, {_number(threads, 'thread')}"

    def timed(self, run: Callable[[], Any]) -> tuple[Any, OpTiming]:
        before, worked, start = _interruptions(), time.process_time(), time.perf_counter()
        result = run()
        seconds = time.perf_counter() - start
        waited_seconds = max(0.0, seconds - (time.process_time() - worked))
        return result, OpTiming(seconds, _interruptions() - before, waited_seconds)

    def timed_in_own_memory(self, run: Callable[[], Any]) -> tuple[Any, OpTiming]:
        fault_seconds, before = page_fault_seconds(), page_faults()
        result, timing = self.timed(run)
        seconds = without_faults(timing.seconds, page_faults() - before, fault_seconds=fault_seconds)
        return result, replace(timing, seconds=seconds, fault_seconds=timing.seconds - seconds)

    def measured(self, run: Callable[[], Any]) -> tuple[Any, int]:
        result, session = recorded(run)
        return result, peak_of(memory_events(session))

    @cache  # noqa: B019  one instance for the whole process
    def copy_bytes_per_second(self) -> float:
        source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
        target = torch.ones_like(source)
        timings = [self.timed(lambda: target.copy_(source))[1] for _ in range(_COPY_RUNS)]
        return _COPY_BYTES / typical_seconds(timings)


class Cuda(Device):
    """One GPU: event pairs as clock, `torch.cuda` statistics as memory, pinned host as copy target.

    `torch_device` may have no index: then it is the current GPU at each call.

    Written against the documented calls of `torch.cuda`; never run by the authors, who had no GPU.
    """

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    @property
    def identity(self) -> str:
        return f"{torch.cuda.get_device_name(self.torch_device)}, CUDA {torch.version.cuda}"

    def timed(self, run: Callable[[], Any]) -> tuple[Any, OpTiming]:
        with torch.cuda.device(self.torch_device):
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            start.record()
            result = run()
            stop.record()
            stop.synchronize()
        return result, OpTiming(start.elapsed_time(stop) / 1e3)

    @property
    def keeps_after_first_run(self) -> bool:
        return True

    def measured(self, run: Callable[[], Any]) -> tuple[Any, int]:
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_allocated(self.torch_device)
        result = run()
        torch.cuda.synchronize(self.torch_device)
        return result, torch.cuda.max_memory_allocated(self.torch_device) - before

    @cache  # noqa: B019  one instance per GPU for the whole process
    def copy_bytes_per_second(self) -> float:
        source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=self.torch_device)
        target = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        copies = [self.timed(lambda: target.copy_(source, non_blocking=True))[1] for _ in range(_COPY_RUNS)]
        return _COPY_BYTES / typical_seconds(copies)


@cache
def device_for(torch_device: torch.device) -> Device:
    """How to measure on `torch_device`."""
    if torch_device.type == "cuda":
        return Cuda(torch_device)
    if torch_device.type == "cpu":
        return Cpu()
    raise ValueError(f"no way to measure on device '{torch_device}': use cpu or cuda")


def recorded(run: Callable[[], Any]) -> tuple[Any, torch.autograd.profiler.profile]:
    """The result of `run`, and what torch's profiler saw of its ops and its memory."""
    # Read when the first session starts; without it every session writes two lines to stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as session:
        result = run()
    return result, session


def memory_events(session: torch.autograd.profiler.profile) -> list[tuple[int, int]]:
    """Time in ns and bytes (negative when freed) of all that a profiler session saw, in order."""
    results = session.kineto_results
    assert results is not None
    seen: list[Any] = [event for event in results.events() if event.name() == "[memory]"]
    return sorted(((event.start_ns(), event.nbytes()) for event in seen), key=lambda event: event[0])


def peak_of(events: Sequence[tuple[int, int]]) -> int:
    """The most bytes held at once, from (time, bytes) events in order; at least 0."""
    held = peak = 0
    for _, nbytes in events:
        held += nbytes
        peak = max(peak, held)
    return peak


def op_at_peak(session: torch.autograd.profiler.profile) -> str:
    """What ran when the most bytes were held: `aten::mm in AddmmBackward0`; empty between ops."""
    held = peak = peak_ns = 0
    for time_ns, nbytes in memory_events(session):
        held += nbytes
        if held > peak:
            peak, peak_ns = held, time_ns
    results = session.kineto_results
    assert results is not None
    events: list[Any] = [
        e for e in results.events() if e.start_ns() <= peak_ns <= e.start_ns() + e.duration_ns()
    ]
    names = [e.name() for e in sorted(events, key=lambda e: e.start_ns())]
    op = next((name for name in names if "::" in name and not name.startswith("autograd::")), "")
    around = [name for name in names if "Backward" in name and "::" not in name]
    around += [name.partition("#")[2] for name in names if name.startswith("Optimizer.step#")]
    return " in ".join(filter(None, (op, *around[:1])))


def _interruptions() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


@cache
def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
