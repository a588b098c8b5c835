"""A step or a graph as flat arrays, for the compiled search: ops that read and make storages.

As in `needs`, an op needs the latest block of each storage that it reads, and makes new blocks. Values
that only refer to a storage (views, parts of tuples) are rematerialized with it, so that the search has
fewer and larger moves; `step_problem` adds their runs.

A remat may serve some readers of a storage only: the sign of a ReLU's value serves the gradient that asks
whether the value is above zero, and no other reader. Readers that the same remats serve are one class, a
bit (`Classes`).
"""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lowtide.planning.native.library import enough_memory, load, pointer
from lowtide.planning.search.table import StorageValues

NEAR = 0.01
"""Reads of a storage that are at most this share of all ops apart are served by the same block."""
MOST = 8
"""Classes of one storage. Where there would be more, only remats that serve all readers are used."""


class Classes:
    """Classes of the readers of each storage.

    `all`: by storage that has several classes, all of them. `served`: by remat and storage, the classes
    that the remat serves; also of storages with one class.
    """

    def __init__(self, values: StorageValues) -> None:
        self._values = values
        self.all: dict[int, int] = {}
        self.served: dict[int, dict[int, int]] = {}
        self._readers: dict[int, dict[int, int]] = {}
        storages = values.table.step.storages
        free = [storage for storage in sorted(values.readers) if not storages[storage].pinned]
        found = {storage: values.classes(storage) for storage in free}
        reads = self._reads([storage for storage in free if 1 < len(found[storage]) <= MOST])
        for storage in free:
            self._add(storage, found[storage], reads.get(storage, {}))

    def _reads(self, storages: list[int]) -> dict[int, dict[int, list[int]]]:
        """By storage and reader, the places of its reads in backward: how many ops made something before."""
        table, values = self._values.table, self._values
        found: dict[int, dict[int, list[int]]] = {storage: {} for storage in storages}
        place = 0
        for op in table.plain[table.first_backward :] if storages else ():
            place += bool(op.fresh)
            for source in {source for read in op.reads for source in values.sources(read)}:
                for storage in values.required[source] & found.keys():
                    found[storage].setdefault(source, []).append(place)
        return found

    def _is_near(self, mine: frozenset[int], reads: dict[int, list[int]]) -> bool:
        """Whether each read of `mine` comes right after one of another reader, whose block is still live."""
        own = [place for reader in mine for place in reads.get(reader, ())]
        others = [place for reader in reads if reader not in mine for place in reads[reader]]
        most = 1 + NEAR * self._values.table.size
        return bool(own) and all(any(0 <= place - other <= most for other in others) for place in own)

    def _add(
        self,
        storage: int,
        found: list[tuple[frozenset[int], frozenset[int]]],
        reads: dict[int, list[int]],
    ) -> None:
        if not 1 < len(found) <= MOST or any(self._is_near(readers, reads) for readers, _ in found):
            for number in sorted(frozenset.intersection(*(remats for _, remats in found))):
                self.served.setdefault(number, {})[storage] = 1
            return
        self.all[storage] = (1 << len(found)) - 1
        self._readers[storage] = {
            reader: 1 << i for i, (readers, _) in enumerate(found) for reader in readers
        }
        for i, (_, remats) in enumerate(found):
            for number in sorted(remats):
                mine = self.served.setdefault(number, {})
                mine[storage] = mine.get(storage, 0) | 1 << i

    def read(self, reads: Iterable[int]) -> dict[int, int]:
        """By storage with several classes, the classes that these reads need."""
        found: dict[int, int] = {}
        if self.all:
            for read in reads:
                for source in self._values.sources(read):
                    for storage in self._values.required[source]:
                        if storage in self.all:
                            one = self._readers[storage].get(source, self.all[storage])
                            found[storage] = found.get(storage, 0) | one
        return found

    def through(self, view: int, storage: int) -> int:
        """The classes of the readers that may read a storage through a view."""
        readers = self._readers[storage].items()
        return sum({one for reader, one in readers if view in self._values.way_back(reader)})

    def made(self, number: int) -> list[tuple[int, int]]:
        """The blocks that a remat makes, as (storage, class)."""
        mine = self.served.get(number, {})
        return [
            (storage, one)
            for storage, _, _ in self._values.table.remats[number].fresh
            for one in single_classes(mine.get(storage, 0) if storage in self.all else 1)
        ]


def single_classes(classes: int) -> list[int]:
    return [1 << i for i in range(MOST) if classes >> i & 1]


Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a sequence: bytes above the budget, summed over its runs; peak; seconds added."""

    excess_bytes: int
    peak_bytes: int
    seconds: float


class _NativeFigures(ctypes.Structure):
    _fields_ = (("excess", ctypes.c_int64), ("peak", ctypes.c_int64), ("seconds", ctypes.c_double))

    @property
    def figures(self) -> Figures:
        return Figures(self.excess, self.peak, self.seconds)


@dataclass(frozen=True)
class Problem:
    """Ops `0..num_first-1` are the first runs in order, the others rematerialize storages.

    Lists of lists are flat: op `i` has `reads[read_ptr[i]:read_ptr[i + 1]]`. `slot[i]`: of a first run, the
    segment whose remats may run right before it; of a remat, its own segment. `remats` are the ops that
    make a storage anew. An `optional` op runs only where another op reads what it makes. `may_move`: first
    runs that may change places. Op `i` reads its storages through the views `vreads`; when a storage is
    rematerialized, each of its `views` that is read later takes `view_seconds`.

    A remat may serve some readers of a storage only. Such readers are of several `classes`, each a bit:
    `read_classes` are those that a read needs, `make_classes` those that a made block serves.

    The arrays stand in the order of `Problem` in native/state.h.
    """

    num_first: int
    static_bytes: int
    read_ptr: Ints
    reads: Ints
    make_ptr: Ints
    makes: Ints
    remat_ptr: Ints
    remats: Ints
    vread_ptr: Ints
    vreads: Ints
    view_ptr: Ints
    views: Ints
    seconds: NDArray[np.float64]
    view_seconds: NDArray[np.float64]
    workspace_bytes: NDArray[np.int64]
    slot: Ints
    optional: NDArray[np.bool_]
    may_move: NDArray[np.bool_]
    nbytes: NDArray[np.int64]
    pinned: NDArray[np.bool_]
    read_classes: NDArray[np.uint8]
    make_classes: NDArray[np.uint8]
    classes: NDArray[np.uint8]

    @cached_property
    def native(self) -> ctypes.Structure:
        """The same for the compiled search."""
        sizes = (self.num_first, len(self.seconds), len(self.nbytes), len(self.view_seconds))
        return _NativeProblem(*sizes, *(pointer(getattr(self, name)) for name in _ARRAYS), self.static_bytes)

    @cached_property
    def _mean_seconds(self) -> float:
        """Of a remat."""
        again = self.seconds[self.num_first :]
        return float(again.mean()) if len(again) and again.any() else 1.0

    def anneal(
        self,
        order: Ints,
        *,
        budget_bytes: int,
        moves: int,
        warmth: float,
        seed: int = 1,
        least_seconds: float = 0.0,
        enough_seconds: float = 0.0,
        reorder: float = 0.0,
    ) -> tuple[Figures, Ints]:
        """The best sequence that `moves` random changes of `order` lead to: first by excess, then by seconds.

        Only sequences that add at least `least_seconds` count. The search ends early at one that fits and
        adds at most `enough_seconds`. At first, it accepts losses of about `warmth` times the seconds of a
        remat. `reorder` is the share of moves that only change places.
        """
        places, found = _with_room(order), _NativeFigures()
        temperature = warmth * self._mean_seconds
        length = load().lowtide_anneal(
            ctypes.byref(self.native),
            pointer(places),
            *(len(order), len(places), budget_bytes, moves),
            *(temperature, seed, least_seconds, enough_seconds, reorder),
            ctypes.byref(found),
        )
        return found.figures, places[: enough_memory(length)].copy()

    def evaluate(self, order: Ints, budget_bytes: int) -> Figures:
        """Bytes and seconds of a sequence."""
        return self._evaluated(order, budget_bytes)[0]

    def live_bytes(self, order: Ints) -> NDArray[np.int64]:
        """Live bytes at every run of a sequence."""
        return self._evaluated(order, 0)[1]

    def _evaluated(self, order: Ints, budget_bytes: int) -> tuple[Figures, NDArray[np.int64]]:
        places, found = _with_room(order), _NativeFigures()
        live = np.zeros(len(places), dtype=np.int64)
        length = load().lowtide_evaluate(
            ctypes.byref(self.native),
            *(pointer(places), len(order), budget_bytes, pointer(live)),
            ctypes.byref(found),
        )
        return found.figures, live[: enough_memory(length)]

    def without(self, ops: frozenset[int]) -> "Problem":
        """The same problem, whose searches put none of `ops` into a sequence."""
        by_storage = [self.remats[first:last].tolist() for first, last in pairwise(self.remat_ptr.tolist())]
        remat_ptr, remats = _flat([[op for op in some if op not in ops] for some in by_storage])
        return replace(self, remat_ptr=remat_ptr, remats=remats)


def _with_room(order: Ints) -> Ints:
    """`order` in an array with room for a sequence that grows from it."""
    places = np.zeros(3 * len(order) + 1024, dtype=np.int32)
    places[: len(order)] = order
    return places


_ARRAYS = [spec.name for spec in fields(Problem) if spec.name not in ("num_first", "static_bytes")]


class _NativeProblem(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("num_first", "num_ops", "num_storages", "num_views")),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
        ("static_bytes", ctypes.c_int64),
    )


@dataclass(slots=True)
class OpRow:
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    seconds: float = 0.0
    workspace_bytes: int = 0
    slot: int = -1
    optional: bool = False
    may_move: bool = False
    views: tuple[int, ...] = ()
    classes: dict[int, int] = field(default_factory=dict)
    """by storage that it reads or makes, which of its classes, where it has several"""


@dataclass(frozen=True, slots=True)
class View:
    """A value that refers to `storage`, and what it takes to take it again."""

    storage: int
    seconds: float


def flatten(
    first: list[OpRow],
    again: list[OpRow],
    *,
    views: list[View],
    nbytes: list[int],
    pinned: list[bool],
    static_bytes: int,
    classes: dict[int, int] | None = None,
) -> Problem:
    """Rows of ops as arrays; `first` and `again` number the `views` by their place. `classes` has the
    storages with several.

    Storages that no op reads or makes are left out, and the others numbered anew.
    """
    rows = [*first, *again]
    used = sorted({s for row in rows for s in (*row.reads, *row.makes)} | {view.storage for view in views})
    number = {storage: i for i, storage in enumerate(used)}
    remats: list[list[int]] = [[] for _ in used]
    for op, row in enumerate(again, start=len(first)):
        for storage in row.makes:
            remats[number[storage]].append(op)
    by_storage: list[list[int]] = [[] for _ in used]
    for i, view in enumerate(views):
        by_storage[number[view.storage]].append(i)
    read_ptr, reads = _flat([[number[s] for s in row.reads] for row in rows])
    make_ptr, makes = _flat([[number[s] for s in row.makes] for row in rows])
    remat_ptr, flat_remats = _flat(remats)
    vread_ptr, vreads = _flat([list(row.views) for row in rows])
    view_ptr, flat_views = _flat(by_storage)
    several = classes or {}
    return Problem(
        num_first=len(first),
        read_ptr=read_ptr,
        reads=reads,
        make_ptr=make_ptr,
        makes=makes,
        remat_ptr=remat_ptr,
        remats=flat_remats,
        vread_ptr=vread_ptr,
        vreads=vreads,
        view_ptr=view_ptr,
        views=flat_views,
        view_seconds=np.array([view.seconds for view in views], dtype=np.float64),
        seconds=np.array([row.seconds for row in rows], dtype=np.float64),
        workspace_bytes=np.array([row.workspace_bytes for row in rows], dtype=np.int64),
        slot=np.array([row.slot for row in rows], dtype=np.int32),
        optional=np.array([row.optional for row in rows], dtype=np.bool_),
        may_move=np.array([row.may_move for row in rows], dtype=np.bool_),
        nbytes=np.array([nbytes[s] for s in used], dtype=np.int64),
        pinned=np.array([pinned[s] for s in used], dtype=np.bool_),
        read_classes=_bits([row.classes.get(s, several.get(s, 1)) for row in rows for s in row.reads]),
        make_classes=_bits([row.classes.get(s, several.get(s, 1)) for row in rows for s in row.makes]),
        classes=_bits([several.get(s, 1) for s in used]),
        static_bytes=static_bytes,
    )


def _bits(classes: list[int]) -> NDArray[np.uint8]:
    return np.array(classes, dtype=np.uint8)


def _flat(lists: list[list[int]]) -> tuple[Ints, Ints]:
    ends = np.cumsum([0, *map(len, lists)])
    return ends.astype(np.int32), np.array([item for some in lists for item in some], dtype=np.int32)
