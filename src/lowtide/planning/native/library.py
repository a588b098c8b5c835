"""Find or build the compiled library, and call it with arrays of numpy."""

import ctypes
import os
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.errors import LowtideError
from lowtide.facts.files import cache_folder
from lowtide.planning.native import SOURCE, build, library_name


def find_or_build(source: Path = SOURCE) -> Path:
    """The library beside its source or in the user's cache; built where it is in neither."""
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
def _library() -> ctypes.CDLL:
    path = find_or_build()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise LowtideError(
            f"the compiled part of the planner cannot be loaded ({error}): remove {path}, so that it is "
            "built for this machine"
        ) from error
    loaded.lowtide_min_cut.restype = ctypes.c_int64
    return loaded


def pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    """The address of an array, which must outlive the call."""
    assert array.flags.c_contiguous
    return array.ctypes.data_as(ctypes.c_void_p)


def min_cut(
    num_vertices: int, tails: NDArray[np.int32], heads: NDArray[np.int32], capacities: NDArray[np.int64]
) -> tuple[int, NDArray[np.bool_]]:
    """The largest flow from vertex 0 to vertex 1, and which vertices are on the source's side of the cut."""
    reached = np.zeros(num_vertices, dtype=np.bool_)
    flow = _library().lowtide_min_cut(
        ctypes.c_int(num_vertices),
        ctypes.c_int(len(tails)),
        pointer(tails),
        pointer(heads),
        pointer(capacities),
        pointer(reached),
    )
    return _enough(flow), reached


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a sequence: bytes above the budget, summed over its runs; peak; seconds added."""

    excess_bytes: int
    peak_bytes: int
    seconds: float


class _Results:
    """Where the library writes figures to."""

    def __init__(self) -> None:
        self._excess, self._peak, self._seconds = ctypes.c_int64(), ctypes.c_int64(), ctypes.c_double()

    @property
    def places(self) -> tuple[Any, ...]:
        return tuple(ctypes.byref(place) for place in (self._excess, self._peak, self._seconds))

    @property
    def figures(self) -> Figures:
        return Figures(self._excess.value, self._peak.value, self._seconds.value)


def evaluate(
    problem: ctypes.Structure, order: NDArray[np.int32], budget_bytes: int
) -> tuple[Figures, NDArray[np.int64]]:
    """What a sequence holds and adds, and what is held at every run of it."""
    places, held = _places(order)
    results = _Results()
    length = _library().lowtide_evaluate(
        ctypes.byref(problem),
        pointer(places),
        ctypes.c_int(len(order)),
        ctypes.c_int64(budget_bytes),
        pointer(held),
        *results.places,
    )
    return results.figures, held[: _enough(length)]


def anneal(
    problem: ctypes.Structure,
    order: NDArray[np.int32],
    *,
    budget_bytes: int,
    moves: int,
    heat: float,
    seed: int = 1,
    least_seconds: float = 0.0,
    enough_seconds: float = 0.0,
    reorder: float = 0.0,
) -> tuple[Figures, NDArray[np.int32]]:
    """The best sequence that `moves` random changes of `order` lead to; see anneal.c."""
    places, _ = _places(order)
    results = _Results()
    length = _library().lowtide_anneal(
        ctypes.byref(problem),
        pointer(places),
        ctypes.c_int(len(order)),
        ctypes.c_int(len(places)),
        ctypes.c_int64(budget_bytes),
        ctypes.c_int64(moves),
        ctypes.c_double(heat),
        ctypes.c_uint64(seed),
        ctypes.c_double(least_seconds),
        ctypes.c_double(enough_seconds),
        ctypes.c_double(reorder),
        *results.places,
    )
    return results.figures, places[: _enough(length)].copy()


def _places(order: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Room for a sequence that grows from `order`, and for what it holds."""
    room = 3 * len(order) + 1024
    places = np.zeros(room, dtype=np.int32)
    places[: len(order)] = order
    return places, np.zeros(room, dtype=np.int64)


def _enough(result: int) -> int:
    if result < 0:
        raise MemoryError("no memory left to plan")
    return result
