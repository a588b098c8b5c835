"""Find, build and load the compiled library, for calls with arrays of numpy."""

import ctypes
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.errors import LowtideError
from lowtide.facts.files import cache_folder
from lowtide.planning.native import SOURCE, build, library_name


def find_or_build(source: Path = SOURCE) -> Path:
    """The library beside its source, or in the user's cache; built where neither has it."""
    name = library_name(source)
    beside = source.parent / name
    if beside.exists():
        return beside
    folder = source.parent if os.access(source.parent, os.W_OK) else cache_folder()
    if (folder / name).exists():
        return folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise LowtideError(
            "the compiled part of the planner is missing, and the folder to build it in cannot be written "
            f"({error}): set XDG_CACHE_HOME to one that can, or install lowtide from a wheel"
        ) from error
    try:
        return build(folder, source)
    except OSError as error:
        raise LowtideError(
            f"the compiled part of the planner is missing and cannot be built ({error}): "
            "install a C compiler or set CC to one, or install lowtide from a wheel"
        ) from error


@cache
def load() -> ctypes.CDLL:
    """The library, with the types of its functions."""
    path = find_or_build()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise LowtideError(
            f"the compiled part of the planner cannot be loaded ({error}): remove {path}, so that it is "
            "built for this machine"
        ) from error
    array, integer, long, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double
    loaded.lowtide_min_cut.restype = long
    loaded.lowtide_min_cut.argtypes = (integer, integer, array, array, array, array)
    loaded.lowtide_evaluate.argtypes = (array, array, integer, long, array, array)
    loaded.lowtide_anneal.argtypes = (
        *(array, array, integer, integer, long, long),
        *(real, ctypes.c_uint64, real, real, real, array),
    )
    return loaded


def pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    """The address of an array, which must outlive the call."""
    assert array.flags.c_contiguous
    return array.ctypes.data_as(ctypes.c_void_p)


def enough_memory(result: int) -> int:
    """What a function of the library returned; MemoryError where it had too little memory."""
    if result < 0:
        raise MemoryError("no memory left to plan")
    return result


def min_cut(
    num_vertices: int, tails: NDArray[np.int32], heads: NDArray[np.int32], capacities: NDArray[np.int64]
) -> tuple[int, NDArray[np.bool_]]:
    """The maximum flow from vertex 0 to vertex 1, and which vertices are on the source's side of the cut."""
    reached = np.zeros(num_vertices, dtype=np.bool_)
    arcs = (pointer(tails), pointer(heads), pointer(capacities))
    flow = load().lowtide_min_cut(num_vertices, len(tails), *arcs, pointer(reached))
    return enough_memory(flow), reached
