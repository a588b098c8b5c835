"""Does a step fit into this machine's memory? Asked before anything is run, never found out by running."""

from pathlib import Path
from typing import Protocol

from lowtide.errors import LowtideError
from lowtide.units import format_size

MARGIN_BYTES = 1 << 30
"""For Python, torch's own libraries and what compiling a model takes."""

CGROUPS = Path("/sys/fs/cgroup")
CGROUP_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""The limit and what is used of it, for the second and for the first kind of control groups."""


class ProcessMemory(Protocol):
    """A step, or a plan for one."""

    @property
    def device(self) -> str: ...

    @property
    def static_bytes(self) -> int: ...


class NotEnoughMemory(LowtideError):
    """A step needs more memory than the machine has free."""


def available_bytes(device: str = "cpu") -> int | None:
    """Memory that a new process can take without swapping; None where nobody can tell."""
    if device == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0]
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([*found, *_left_to_containers()], default=None)


def _left_to_containers(groups: Path = CGROUPS, of_process: Path = Path("/proc/self/cgroup")) -> list[int]:
    """What the control groups of this process, one within the other, still allow, where they set a limit."""
    lines = of_process.read_text().splitlines() if of_process.exists() else []
    left = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = groups / "memory" if controllers else groups
        own = root / name.lstrip("/")
        left += [_left(folder) for folder in (own, *own.parents) if folder.is_relative_to(root)]
    return [nbytes for nbytes in left if nbytes is not None]


def _left(group: Path) -> int | None:
    """Bytes below a control group's limit; pages of files count as free, since the kernel gives them up."""
    for limit, current in CGROUP_FILES:
        if (group / limit).exists() and (group / current).exists():
            most = (group / limit).read_text().strip()
            if not most.isdigit():
                return None
            return max(0, int(most) - int((group / current).read_text()) + _file_pages(group))
    return None


def _file_pages(group: Path) -> int:
    stat = group / "memory.stat"
    lines = stat.read_text().splitlines() if stat.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def needed_bytes(step: ProcessMemory, *, peak_bytes: int) -> int:
    """Memory to run a step and compare its results: its peak, a copy of what it starts from, a margin."""
    return peak_bytes + step.static_bytes + MARGIN_BYTES


def why_not(step: ProcessMemory, *, peak_bytes: int) -> str:
    """Why this machine cannot run the step, in words; empty when it can."""
    needed, available = needed_bytes(step, peak_bytes=peak_bytes), available_bytes(step.device)
    if available is None or needed <= available:
        return ""
    return f"needs {format_size(needed)}, and {format_size(available)} are free"


def check_memory(step: ProcessMemory, *, peak_bytes: int, what: str) -> None:
    """Refuse to run what does not fit."""
    reason = why_not(step, peak_bytes=peak_bytes)
    if reason:
        raise NotEnoughMemory(f"{what} does not fit into this machine: it {reason}. Try a smaller batch")
