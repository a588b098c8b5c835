"""From what the user says to a store."""

import logging
import os
from pathlib import Path

from lowtide.errors import StoreError
from lowtide.facts.plan import OffloadTarget
from lowtide.offload.disk_store import DiskStore
from lowtide.offload.host_store import HostStore
from lowtide.offload.store import Store

logger = logging.getLogger("lowtide")

MOUNTS = Path("/proc/self/mounts")
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def open_store(swap: OffloadTarget, device: str) -> Store:
    """A store for the values of a model on `device`; `StoreError` where it cannot be."""
    on_cpu = device.partition(":")[0] == "cpu"
    if swap.kind == "disk" and on_cpu:
        return DiskStore(swap.folder)
    if swap.kind == "host" and not on_cpu:
        return HostStore()
    raise StoreError(
        f"swap='{swap}' is for a model on {'an accelerator' if on_cpu else 'the CPU'}, and this one is on "
        f"{device}: write swap={'disk:FOLDER' if on_cpu else 'host'!r}"
    )


def warn_of_memory(swap: OffloadTarget) -> None:
    """Say so where a folder is no disk at all."""
    if swap.kind == "disk" and (kind := _file_system(swap.folder)) in IN_MEMORY:
        logger.warning(
            "the folder '%s' is in memory (%s), so that what is swapped there takes as much memory as "
            "before: choose a folder on a disk",
            swap.folder,
            kind,
        )


def _file_system(folder: str) -> str:
    """The type of the file system that a folder is on; empty where nobody tells."""
    if not MOUNTS.exists():
        return ""
    rows = [line.split() for line in MOUNTS.read_text().splitlines()]
    place = Path(os.path.realpath(folder))
    # of two at one place the later hides the earlier
    found = [(len(row[1]), i, row[2]) for i, row in enumerate(rows) if place.is_relative_to(row[1])]
    return max(found, default=(0, 0, ""))[2]
