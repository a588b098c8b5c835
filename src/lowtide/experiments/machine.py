"""Does a step fit into this machine's memory? Asked before anything is run, never found out by running."""

from pathlib import Path

from lowtide.errors import LowtideError
from lowtide.facts import Step
from lowtide.sizes import format_size

MARGIN_BYTES = 1 << 30
"""For Python, torch's own libraries and what compiling a model takes."""


class NotEnoughMemory(LowtideError):
    """A step needs more memory than the machine has free."""


def available_bytes(device: str = "cpu") -> int | None:
    """Memory that a new process can take without swapping; None where nobody can tell."""
    if device == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0]
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def needed_bytes(step: Step, *, peak_bytes: int) -> int:
    """Memory to run a step and compare its results: its peak, a copy of what it starts from, a margin."""
    start = sum(storage.nbytes for storage in step.storages if storage.static)
    return peak_bytes + start + MARGIN_BYTES


def why_not(step: Step, *, peak_bytes: int) -> str:
    """Why this machine cannot run the step, in words; empty when it can."""
    needed, available = needed_bytes(step, peak_bytes=peak_bytes), available_bytes(step.device)
    if available is None or needed <= available:
        return ""
    return f"needs {format_size(needed)}, and {format_size(available)} are free"


def check_memory(step: Step, *, peak_bytes: int, what: str) -> None:
    """Refuse to run what does not fit."""
    reason = why_not(step, peak_bytes=peak_bytes)
    if reason:
        raise NotEnoughMemory(f"{what} does not fit into this machine: it {reason}. Try a smaller batch")
