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


def open_store(target: OffloadTarget, device: str) -> Store:
    """A store for the values of a model on `device`; `StoreError` where it cannot be."""
    on_cpu = device.partition(":")[0] == "cpu"
    if target.kind == "disk" and on_cpu:
        return DiskStore(target.folder)
    if target.kind == "host" and not on_cpu:
        return HostStore()
    raise StoreError(
        f"offload='{target}' is for a model on {'an accelerator' if on_cpu else 'the CPU'}, and this one is "
        f"on {device}: write offload={'disk:FOLDER' if on_cpu else 'host'!r}"
    )


def warn_of_memory(target: OffloadTarget) -> None:
    """Say so where a folder is no disk at all."""
    if target.kind == "disk" and (kind := _file_system(target.folder)) in IN_MEMORY:
        logger.warning(
            "the folder '%s' is in memory (%s), so that offloaded values take as much memory as "
            "before: choose a folder on a disk",
            target.folder,
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
