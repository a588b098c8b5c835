"""The largest number of bytes live while a function runs, above those live when it started.

torch keeps no statistics of its CPU allocator. Two independent ways to know are here, and they
should agree: torch's profiler sees every block that torch asks for; the resident high-water mark is
what the kernel saw of the whole process. On CUDA the allocator itself keeps the peak.
"""

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from lowtide.profiling.devices import device_for

CPU = torch.device("cpu")
RESIDENT_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
"""With these, glibc returns memory to the kernel when it is freed, so that residence follows use."""


def peak_above_start(step: Callable[[], object], *, device: torch.device = CPU) -> int:
    """Peak bytes that torch has live on `device` during `step()`, above those live before it.

    torch's profiler on the CPU, which does not see a block freed that was there before the start: a
    step that frees such blocks is measured too high. On CUDA, the allocator's own count.
    """
    gc.collect()
    return device_for(device).measured(step)[1]


def peak_and_op(step: Callable[[], object], *, device: torch.device = CPU) -> tuple[int, str]:
    """As `peak_above_start`, with the op that ran at the peak; empty where only the allocator counts."""
    gc.collect()
    return device_for(device).peak_and_op(step)


def can_measure_resident() -> bool:
    """Whether this system reports and resets the resident high-water mark (Linux)."""
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


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {field}")
