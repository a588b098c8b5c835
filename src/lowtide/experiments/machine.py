"""This machine: memory for a step, and the dependencies of lowtide.

`check_memory` asks whether a step fits before it is run. `CHECKS` are the checks of `lowtide doctor`: each
returns its finding in one line, as a `Note` where lowtide works in spite of a problem. It raises where
lowtide, or a part of it, does not work here. A check that needs torch imports it itself: without torch, the
others still work.
"""

import importlib.util
import os
import resource
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from lowtide.errors import LowtideError
from lowtide.facts.files import temporary_folder
from lowtide.facts.gpus import gpu_behind
from lowtide.facts.host_memory import host_bytes
from lowtide.units import format_size

MARGIN_BYTES = 1 << 30
"""For Python, torch's own libraries and the compilation of a model."""

LITTLE_BYTES = 2 << 30
"""Of memory: torch, its libraries and compiling a small model take about half of it."""
LITTLE_DISK_BYTES = 64 << 20
"""On a disk."""
BUSY_SHARE = 0.5
"""Of the cores, kept busy by others before anything starts."""


class ProcessMemory(Protocol):
    """A step, or a solution for one."""

    @property
    def device(self) -> str: ...

    @property
    def static_bytes(self) -> int: ...


class NotEnoughMemory(LowtideError):
    """A step needs more memory than the machine has free."""


MOST_LOAD = 1.5
"""Runnable processes per processor, over a minute, above which times are not trusted."""


def why_busy() -> str:
    """Why times of this machine say little now; empty where they are trusted, or the load is unknown."""
    if not hasattr(os, "getloadavg"):
        return ""
    load, processors = os.getloadavg()[0], os.cpu_count() or 1
    if load <= MOST_LOAD * processors:
        return ""
    return f"the machine is busy (load {load:.1f} on {processors} processors)"


def available_bytes(device: str = "cpu") -> int | None:
    """Memory that a new process can take without paging; None where the system does not tell."""
    if device != "cpu" and gpu_behind(device) is None:
        import torch

        from lowtide.profiling.devices import device_for

        return device_for(torch.device(device)).free_bytes()
    return host_bytes()


def needed_bytes(step: ProcessMemory, *, peak_bytes: int) -> int:
    """Memory to run a step and compare its results: its peak, a copy of its start state, a margin."""
    return peak_bytes + step.static_bytes + MARGIN_BYTES


def why_not(step: ProcessMemory, *, peak_bytes: int) -> str:
    """Why this machine cannot run the step, in words; empty when it can."""
    needed, available = needed_bytes(step, peak_bytes=peak_bytes), available_bytes(step.device)
    if available is None or needed <= available:
        return ""
    return f"needs {format_size(needed)}, and {format_size(available)} are free"


def check_memory(step: ProcessMemory, *, peak_bytes: int, what: str) -> None:
    """Raise NotEnoughMemory where a step does not fit."""
    reason = why_not(step, peak_bytes=peak_bytes)
    if reason:
        raise NotEnoughMemory(f"{what} does not fit into this machine: it {reason}. Try a smaller batch")


class Note(str):
    """A finding that a reader should know; lowtide still works."""

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
    from lowtide.torch_compat import CHECKED_TORCH, REQUIREMENT, check_version, is_newer

    check_version(torch.__version__)
    if is_newer(torch.__version__):
        return Note(
            f"{torch.__version__}, newer than {CHECKED_TORCH[-1]}, the last that was checked: pip install "
            f"'{REQUIREMENT}'"
        )
    return torch.__version__


def planner() -> str:
    """The compiled part of the planner."""
    import numpy as np

    from lowtide.planning.native.library import min_cut

    start, end = (np.array([vertex], dtype=np.int32) for vertex in (0, 1))
    flow, _ = min_cut(2, start, end, np.array([7], dtype=np.int64))
    assert flow == 7
    return "its compiled part works"


def costs() -> str:
    """The folder of the cost cache."""
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
    if free_bytes < LITTLE_DISK_BYTES:
        return Note(
            f"{text}, and models go to fresh processes by it: make room, or set TMPDIR to another folder"
        )
    asked = os.environ.get("TMPDIR")
    if asked and Path(asked).absolute() != folder:
        return Note(f"{text}; TMPDIR={asked} cannot be written: make that folder, or make room there")
    return text


def fresh_processes() -> str:
    """Fresh processes measure peaks and verify plans."""
    from lowtide.verification.fresh_process import run_fresh

    run_fresh("os:getpid")
    return "can be started"


def memory() -> str:
    free_bytes, (limit_bytes, _) = available_bytes(), resource.getrlimit(resource.RLIMIT_AS)
    text = "the system does not tell" if free_bytes is None else f"{format_size(free_bytes)} free"
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
    """The load by other processes, read before this process works."""
    busy, cores = os.getloadavg()[0], os.cpu_count() or 1
    text = f"{busy:.1f} of {cores} cores in the last minute"
    return (
        Note(f"{text}: times are not to be trusted on a busy machine") if busy > BUSY_SHARE * cores else text
    )


def transformers() -> str:
    """The library of most built-in models."""
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
    """The compiler that executor 'inductor' needs."""
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
"""Left out where torch does not work."""


HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Environment variables that hide accelerators from a process."""


def accelerator_kind() -> str:
    """The kind of the accelerator that torch shows, such as `cuda`; empty where it shows none."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return "" if found is None else found.type


def why_no_accelerator() -> str:
    """Why torch shows no accelerator here."""
    import torch

    built_for = torch.accelerator.current_accelerator()
    if built_for is None:
        return "this torch is built for no accelerator: https://pytorch.org/get-started names one that is"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.get_device_module(built_for).is_available()
    why = "; ".join(str(warning.message).strip().splitlines()[0] for warning in said)
    if not why and built_for.type == "cuda":
        why = "nvidia-smi or rocm-smi says whether the driver sees one"
    hidden = "".join(f" with {name}={os.environ[name]}" for name in HIDING if name in os.environ)
    return f"torch sees no {built_for.type} device here{hidden}: {why or 'the driver tells of none'}"
