"""The largest number of bytes held while a function runs, above what was held when it started.

torch keeps no statistics of its CPU allocator. Two independent ways to know are here, and they
should agree: torch's profiler sees every block that torch asks for; the resident high-water mark is
what the kernel saw of the whole process. On CUDA the allocator itself keeps the peak.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

RESIDENT_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
"""With these, glibc returns memory to the kernel when it is freed, so that residence follows use."""


def peak_above_start(step: Callable[[], object], *, device: torch.device) -> int:
    """Peak bytes that torch holds on `device` during `step()`, above those held before it."""
    return cuda_peak(step, device=device) if device.type == "cuda" else profiler_peak(step)


def profiler_peak(step: Callable[[], object]) -> int:
    """Peak of the running sum of torch's CPU allocations and frees, by torch's profiler.

    It does not see a block freed that was there before the start: such a step is measured too high.
    """
    gc.collect()
    with (
        _quiet_kineto(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as run,
    ):
        step()
    assert run.profiler is not None and run.profiler.kineto_results is not None
    events = [
        (event.start_ns(), event.nbytes())
        for event in run.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type().name == "CPU"
    ]
    events.sort(key=lambda event: event[0])  # stable: events of one nanosecond stay in their order
    held = peak = 0
    for _, nbytes in events:
        held += nbytes
        peak = max(peak, held)
    return peak


def can_measure_resident() -> bool:
    """Whether this system can tell and reset the resident high-water mark (Linux)."""
    return sys.platform == "linux" and Path("/proc/self/clear_refs").exists()


def resident_peak(step: Callable[[], object]) -> int:
    """Growth of the process's resident high-water mark during `step()`.

    Means something only in a process that was started with `RESIDENT_ENVIRONMENT`, and after a
    warm-up: what torch loads or allocates only once would count as well.
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    step()
    return _status_bytes("VmHWM") - before


def cuda_peak(step: Callable[[], object], *, device: torch.device) -> int:
    """Growth of the CUDA allocator's peak during `step()`."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


@contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Without this the profiler's library writes two lines to stderr, past Python."""
    variable = "KINETO_LOG_LEVEL"
    if variable in os.environ:
        yield
        return
    os.environ[variable] = "99"
    try:
        yield
    finally:
        del os.environ[variable]


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {field}")
