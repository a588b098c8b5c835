"""A record of the blocks that the CPU's allocator hands out and takes back in one thread.

torch's older profiler tells of them, and is neutral: no op asks whether it is on. A dispatch mode is not
neutral: some ops of ATen take another branch under one.

    start()      blocks of this thread are recorded from here on
    mark()       a place in the record that can be found again
    stop()       the sizes in their order, negative for a block that was freed, None for the mark

The allocator tells of a freed block only where it recorded the allocation. Autograd restores the thread's
profiler after every node, so that a record cannot stop inside of a backward pass.
"""

import ctypes
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig, _RecordFunctionFast

from lowtide.torch_compat.autograd_engine import ProcessPatch, in_backward, profiler_is_active

MARK = "lowtide: mark"
ERRORS_ONLY = 2
"""The log level of torch's C++ code that shows no warnings."""


class AllocationRecord:
    """One record. `on_interruption` is called before another profiler of this thread begins: the record must
    stop then, since a thread has one profiler."""

    def __init__(self, on_interruption: Callable[[], None]) -> None:
        self.on_interruption = on_interruption
        self.is_on = False
        self._thread = 0
        self._release: Callable[[], object] = lambda: None
        self._log_level = 0

    def start(self) -> bool:
        """False inside of a backward pass, and where the thread has a profiler already."""
        if in_backward() or profiler_is_active():
            return False
        self._thread, self.is_on = threading.get_ident(), True
        self._release = _BEFORE_PROFILER.hold(self)
        _RUNNING[self._thread] = self
        self._log_level = _set_log_level(ERRORS_ONLY)
        torch._C._autograd._enable_profiler_legacy(_profiler_config())
        return True

    def mark(self) -> None:
        with _RecordFunctionFast(MARK):
            pass

    @property
    def can_stop(self) -> bool:
        return self.is_on and threading.get_ident() == self._thread and not in_backward()

    def stop(self) -> list[int | None]:
        """The record's sizes. Only where it `can_stop`."""
        self.is_on = False
        events = torch._C._autograd._disable_profiler_legacy()
        _set_log_level(self._log_level)
        _RUNNING.pop(self._thread, None)
        self._release()
        # the events of a thread are in their order; those of another thread have a clock of their own
        own: list[Any] = max(events, key=lambda one: any(event.name() == MARK for event in one), default=[])
        sizes = [
            event.cpu_memory_usage() if event.kind() == "memory_alloc" else None
            for event in own
            if event.kind() == "memory_alloc" or event.name() == MARK
        ]
        return [nbytes for nbytes in sizes if nbytes != 0]


def _profiler_config() -> Any:
    """Settings of torch's older profiler: ops, and memory of the CPU."""
    return ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())


def profiler_events(run: Callable[[], Any]) -> tuple[Any, list[list[Any]]]:
    """The result of `run`, and its ops (`push`, `pop`) and CPU allocations (`memory_alloc`) by thread.

    torch's older profiler records the same bytes as torch.profiler, and touches nothing outside of this
    thread: Kineto, below torch.profiler, writes two lines to stderr for each session and ends any other one.
    """
    torch._C._autograd._enable_profiler_legacy(_profiler_config())
    _MEASURING.add(threading.get_ident())
    try:
        result = run()
    finally:
        _MEASURING.discard(threading.get_ident())
        events = torch._C._autograd._disable_profiler_legacy()
    return result, events


_MEASURING: set[int] = set()
"""Threads in which `profiler_events` runs."""


def users_profiler_is_active() -> bool:
    """Whether a profiler of the user is on in this thread."""
    return profiler_is_active() and threading.get_ident() not in _MEASURING


_RUNNING: dict[int, AllocationRecord] = {}
"""The records that are on, by thread."""


def _before_profiler(original: Callable[[], None]) -> Callable[[], None]:
    def start() -> None:
        if (record := _RUNNING.get(threading.get_ident())) is not None:
            record.on_interruption()
        original()

    return start


_BEFORE_PROFILER = ProcessPatch(torch.autograd.profiler, "_run_on_profiler_start", _before_profiler)


@functools.cache
def _log_level() -> ctypes.c_int | None:
    """torch's setting, which its environment variable TORCH_CPP_LOG_LEVEL sets; None where it has none."""
    libraries = Path(torch.__file__).parent / "lib"
    for path in sorted(libraries.glob("*c10.*")):
        try:
            return ctypes.c_int.in_dll(ctypes.CDLL(str(path)), "FLAGS_caffe2_log_level")
        except (OSError, ValueError):  # another library, or torch with another log
            continue
    return None


def _set_log_level(level: int) -> int:
    """Set the log level of torch's C++ code; the level before. The allocator would warn of blocks that are
    older than the record."""
    setting = _log_level()
    if setting is None:
        return level
    before = setting.value
    setting.value = level
    return before
