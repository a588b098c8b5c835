"""Memory of this machine that a process can still take: the kernel's figure, and the limits of containers and
of the process."""

import resource
import socket
import sys
from pathlib import Path

HIGH_WATER = Path("/proc/self/clear_refs")
CGROUPS = Path("/sys/fs/cgroup")
CGROUP_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""The limit and its use, for control groups of version 2 and 1."""


def host_bytes() -> int | None:
    """Bytes that can be taken without paging; None where the system does not tell.

    These are more than the free pages: the kernel gives up pages of files that it only caches.
    """
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([*found, *left_to_containers(), *left_to_process()], default=None)


def resident_bytes() -> int | None:
    """Bytes of this process that are in memory and in no file; None where the system does not tell."""
    return status_bytes("RssAnon", "RssShmem")


def resident_peak_bytes() -> int:
    """The most resident bytes of this process since it began, or since they were last reset."""
    found = status_bytes("VmHWM")
    if found is None:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
    return found


def reset_resident_peak() -> bool:
    """Let the high-water mark begin anew, for all readers in this process; False where that is impossible."""
    try:
        HIGH_WATER.write_text("5")
    except OSError:  # no Linux, or a sandbox
        return False
    return True


def status_bytes(*fields: str) -> int | None:
    """The sum of these fields of the kernel's page about this process; None where there is none of them."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.partition(":")[0] in fields]
    return sum(found) if found else None


def machine_id() -> str:
    """A text that is the same for all processes that share this machine's memory."""
    started = Path("/proc/sys/kernel/random/boot_id")
    return started.read_text().strip() if started.exists() else socket.gethostname()


LIMITS = ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))
"""Limits of one process (`ulimit -v`, `ulimit -d`), and the kernel's names of what counts towards each."""


def left_to_process() -> list[int]:
    """The bytes below each limit that this process has."""
    left = []
    for limit, field in LIMITS:
        most, used = resource.getrlimit(limit)[0], status_bytes(field)
        if most != resource.RLIM_INFINITY and used is not None:
            left.append(max(0, most - used))
    return left


def left_to_containers(groups: Path = CGROUPS, of_process: Path = Path("/proc/self/cgroup")) -> list[int]:
    """The free bytes of each control group of this process that sets a limit."""
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
