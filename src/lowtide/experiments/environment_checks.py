"""What lowtide stands on, looked at before anything is planned: each check is a function of one line.

A check says what it found, as a `Note` where something is amiss and lowtide works all the same; it raises
where lowtide, or a part of it, does not work here. Whatever needs torch imports it itself: without torch, the
others still have their say.
"""

import importlib.util
import os
import resource
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from lowtide.errors import LowtideError
from lowtide.experiments.machine_memory import available_bytes
from lowtide.facts.files import temporary_folder
from lowtide.units import format_size

LITTLE_BYTES = 2 << 30
"""Of memory: torch, its libraries and compiling a small model take about half of it."""
LITTLE_ROOM_BYTES = 64 << 20
"""On a disk."""
BUSY_SHARE = 0.5
"""Of the cores, kept busy by others before anything starts."""


class Note(str):
    """A finding that stops nobody, and that a reader should know."""

    __slots__ = ()


def _short(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def torch_version() -> str:
    try:
        import torch
    except Exception as error:
        raise LowtideError(
            f"torch cannot be imported ({_short(error)}): pip install --force-reinstall torch"
        ) from error
    if not hasattr(torch, "__version__"):
        where = getattr(torch, "__file__", None) or list(torch.__path__)
        raise LowtideError(f"what is imported as torch is {where}: rename it, or start somewhere else")
    from lowtide.torch_compat.versions import CHECKED_TORCH, REQUIREMENT, check_version, is_newer

    check_version(torch.__version__)
    if is_newer(torch.__version__):
        return Note(
            f"{torch.__version__}, newer than {CHECKED_TORCH[-1]}, the last that was checked: pip install "
            f"'{REQUIREMENT}'"
        )
    return torch.__version__


def planner() -> str:
    """The part of the planner that is compiled."""
    import numpy as np

    from lowtide.planning.native.library import min_cut

    start, end = (np.array([vertex], dtype=np.int32) for vertex in (0, 1))
    flow, _ = min_cut(2, start, end, np.array([7], dtype=np.int64))
    assert flow == 7
    return "its compiled part works"


def costs() -> str:
    """Where costs of ops are remembered from one run to the next."""
    from lowtide.profiling.cache import cache_directory

    folder = cache_directory()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return "are remembered"
    except OSError as error:
        return Note(f"are not remembered ({error}): set LOWTIDE_CACHE_DIR to a folder that can be written")


def temporary_files() -> str:
    with temporary_folder() as made:
        folder = Path(made).parent
        free_bytes = shutil.disk_usage(folder).free
    text = f"{folder}, {format_size(free_bytes)} free"
    if free_bytes < LITTLE_ROOM_BYTES:
        return Note(
            f"{text}, and models go to fresh processes by it: make room, or set TMPDIR to another folder"
        )
    asked = os.environ.get("TMPDIR")
    if asked and Path(asked).absolute() != folder:
        return Note(f"{text}; TMPDIR={asked} cannot be written: make that folder, or make room there")
    return text


def fresh_processes() -> str:
    """Where peaks are measured, and plans verified."""
    from lowtide.verification.fresh_process import run_fresh

    run_fresh("os:getpid")
    return "can be started"


def memory() -> str:
    free_bytes, (limit_bytes, _) = available_bytes(), resource.getrlimit(resource.RLIMIT_AS)
    text = "nobody says how much is free" if free_bytes is None else f"{format_size(free_bytes)} free"
    if free_bytes is not None and free_bytes < LITTLE_BYTES:
        return Note(
            f"{text}: with less than {format_size(LITTLE_BYTES)}, checks may fail: end other programs"
        )
    if limit_bytes != resource.RLIM_INFINITY:
        return Note(
            f"{text}, of which a process may take {format_size(limit_bytes)} of addresses, far more than it "
            "uses: checks may fail, unless ulimit -v unlimited"
        )
    return text


def threads() -> str:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = torch.get_num_threads()
    text = f"{count} on {cores} cores"
    return Note(f"{text}, which wait for each other: set OMP_NUM_THREADS={cores}") if count > cores else text


def load() -> str:
    """How busy others keep the machine; asked before this process does anything."""
    busy, cores = os.getloadavg()[0], os.cpu_count() or 1
    text = f"{busy:.1f} of {cores} cores in the last minute"
    return (
        Note(f"{text}: times are not to be trusted on a busy machine") if busy > BUSY_SHARE * cores else text
    )


def transformers() -> str:
    """What most built-in models are made of."""
    if importlib.util.find_spec("transformers") is None:
        return Note("not installed, as most built-in models need: pip install lowtide[models]")
    from lowtide.zoo.build import build

    try:
        build("tiny-bert-base", batch_size=1)
    except Exception as error:
        raise LowtideError(
            f"transformers makes no model ({_short(error)}): install lowtide[models] in a new environment, "
            "and nothing that breaks it, such as torchvision for another torch"
        ) from error
    return "makes models"


def inductor() -> str:
    """What executor 'inductor' needs."""
    from lowtide.torch_compat.inductor import has_compiler

    if has_compiler():
        return "has a C++ compiler"
    return Note("has no C++ compiler, as executor 'inductor' needs: install g++, or set CXX to one")


CHECKS: dict[str, Callable[[], str]] = {
    "load": load,
    "memory": memory,
    "temporary files": temporary_files,
    "planner": planner,
    "torch": torch_version,
}
WITH_TORCH: dict[str, Callable[[], str]] = {
    "threads": threads,
    "costs of ops": costs,
    "fresh processes": fresh_processes,
    "transformers": transformers,
    "inductor": inductor,
}
"""Those that say nothing where torch does not work."""


def why_no_cuda() -> str:
    """Why no CUDA device can be checked here; empty when one can."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return ""
    why = "; ".join(str(warning.message).strip().splitlines()[0] for warning in said)
    if torch.version.cuda is None:
        why = "it is built without CUDA"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    setting = "" if hidden is None else f" with CUDA_VISIBLE_DEVICES={hidden}"
    return f"torch sees no CUDA device here{setting}: {why or 'nvidia-smi says whether the driver sees one'}"
