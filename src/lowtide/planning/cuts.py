"""One time point of a step as a minimum cut.

At the time point when rank `t` runs first, some storages are live. A storage that is needed later and not
live must be made anew after that time point. This relaxes every schedule: it forgets all other time points,
the bytes that are made later, and how often a value is made anew. With a price per byte, the cheapest
choice of what to keep live and what to make anew is a minimum cut of this network:

    source ──∞──> storage ──bytes × price──> its group of remats ──seconds──> sink
                                                 └──∞──> storages that all of these remats read

- to keep a storage that is needed live cuts the arc that leaves it; to make it anew cuts the group's;
- where less can be kept of a storage for some of its readers (packed), a second arc carries the remaining
  capacity, for the readers that need all of it.

By duality, seconds plus price times bytes of the cut, minus price times the free bytes of the budget, is at
most what any schedule within the budget adds, for every price.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.planning.native.library import min_cut
from lowtide.planning.needs import Needs

SOURCE, SINK = 0, 1
LARGEST = 2**52
"""Capacities are integers up to this one; rounding them down keeps a bound a bound."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The minimum cut at a price: its `value` in seconds; it adds `seconds` and keeps `nbytes` live.

    `kept` are the live storages; of those that are also `packed`, only the packed form is live.
    """

    price: float
    value: float
    seconds: float
    nbytes: float
    kept: tuple[int, ...]
    packed: tuple[int, ...]
    reached: NDArray[np.bool_]
    """the vertices on the source's side: needed and not live"""


@dataclass(frozen=True, slots=True)
class TimePoint:
    """The network at the time point when `rank` runs first.

    `fixed_bytes` are live in every schedule; `always` are the storages among them that are needed later.

    Arcs go from `tails` to `heads`. Cutting one takes `arc_seconds` and keeps `arc_bytes` live, or takes
    `kept_seconds` and keeps `kept_bytes` live where that is cheaper. A `rest` arc carries the remaining
    capacity: what the cheaper choice lacks. An `infinite` arc is never cut.
    """

    rank: int
    fixed_bytes: int
    always: tuple[int, ...]
    num_vertices: int
    tails: NDArray[np.int32]
    heads: NDArray[np.int32]
    infinite: NDArray[np.bool_]
    rest: NDArray[np.bool_]
    arc_storage: NDArray[np.int64]
    """the storage that cutting the arc keeps live, else -1"""
    arc_seconds: NDArray[np.float64]
    arc_bytes: NDArray[np.float64]
    kept_seconds: NDArray[np.float64]
    kept_bytes: NDArray[np.float64]

    def cut(self, price: float) -> Cut:
        """The minimum cut when a byte costs `price` seconds."""
        return self._cut(1.0, price)

    def leanest(self) -> Cut:
        """The cut with the fewest bytes, at any seconds; its value is in bytes."""
        return self._cut(0.0, 1.0)

    def everything(self) -> Cut:
        """The cut that keeps all that is needed live, and adds no seconds."""
        wanted = np.zeros(self.num_vertices, dtype=bool)
        wanted[SOURCE] = True
        for _ in range(2):  # a storage that is needed whole, and what could be kept of it
            wanted[self.heads[wanted[self.tails] & self.infinite]] = True
        live = (self.arc_storage >= 0) & ~self.rest & wanted[self.tails]
        kept = tuple(sorted(self.arc_storage[live].tolist()))
        return Cut(0.0, 0.0, 0.0, float(self.arc_bytes[live].sum()), kept, (), wanted)

    def between(self, lean: Cut, rich: Cut, free_bytes: float) -> Cut:
        """The cut `lean` with the parts of `rich` that fit into `free_bytes` as well.

        Where one price has several minimum cuts, as with equal layers, all mixtures of them are minimal.
        """
        differs = lean.reached & ~rich.reached
        inner = differs[self.tails] & differs[self.heads]
        part = components(self.num_vertices, self.tails[inner], self.heads[inner])
        # for each part: the bytes and seconds where it is kept live, minus those where it is made anew
        entered = lean.reached[self.tails] & differs[self.heads] & ~inner
        left = differs[self.tails] & ~lean.reached[self.heads]
        is_whole = self._is_whole(1.0, lean.price)

        def more(whole: NDArray[np.float64], kept: NDArray[np.float64]) -> list[float]:
            taken = self._taken(whole, kept, is_whole)
            come = np.bincount(part[self.heads[entered]], taken[entered], self.num_vertices)
            gone = np.bincount(part[self.tails[left]], taken[left], self.num_vertices)
            found: list[float] = (come - gone).tolist()
            return found

        more_bytes = more(self.arc_bytes, self.kept_bytes)
        more_seconds = more(self.arc_seconds, self.kept_seconds)
        numbers = [n for n in np.unique(part[differs]).tolist() if more_seconds[n] < 0]
        reached, nbytes = lean.reached.copy(), lean.nbytes
        for number in sorted(numbers, key=lambda n: (more_seconds[n] / max(more_bytes[n], 1.0), n)):
            if nbytes + more_bytes[number] <= free_bytes:
                nbytes += more_bytes[number]
                reached &= part != number
        return self._border(1.0, lean.price, 0.0, reached)

    def _cut(self, weight: float, price: float) -> Cut:
        """The cheapest cut for `weight` times its seconds plus `price` times its bytes."""
        whole = weight * self.arc_seconds + price * self.arc_bytes
        least = np.minimum(whole, weight * self.kept_seconds + price * self.kept_bytes)
        costs = np.where(self.rest, whole - least, least)
        most = float(costs[(self.heads == SINK) & ~self.infinite].sum())
        if most <= 0:
            # no storage needs to be live
            reached = np.arange(self.num_vertices) != SINK
            return Cut(price, 0.0, float(self.arc_seconds.sum()), 0.0, (), (), reached)
        scale = LARGEST / most if weight else 1.0
        capacities = np.minimum(costs * scale, LARGEST).astype(np.int64)
        capacities[self.infinite] = LARGEST
        flow, reached = min_cut(self.num_vertices, self.tails, self.heads, capacities)
        return self._border(weight, price, flow / scale, reached)

    def _border(self, weight: float, price: float, value: float, reached: NDArray[np.bool_]) -> Cut:
        """The cut between the vertices `reached` and the others."""
        is_whole = self._is_whole(weight, price)
        crossing = reached[self.tails] & ~reached[self.heads]
        live = self.arc_storage[crossing]
        packed = set(self.arc_storage[crossing & ~is_whole & ~self.rest].tolist())
        return Cut(
            price=price,
            value=value,
            seconds=float(self._taken(self.arc_seconds, self.kept_seconds, is_whole)[crossing].sum()),
            nbytes=float(self._taken(self.arc_bytes, self.kept_bytes, is_whole)[crossing].sum()),
            kept=tuple(sorted(set(live[live >= 0].tolist()))),
            packed=tuple(sorted(packed.difference(self.arc_storage[crossing & self.rest].tolist()))),
            reached=reached,
        )

    def _is_whole(self, weight: float, price: float) -> NDArray[np.bool_]:
        """By arc, whether the whole storage is as cheap as its packed form."""
        whole = weight * self.arc_seconds + price * self.arc_bytes
        is_whole: NDArray[np.bool_] = whole <= weight * self.kept_seconds + price * self.kept_bytes
        return is_whole

    def _taken(
        self, whole: NDArray[np.float64], kept: NDArray[np.float64], is_whole: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """What cutting each arc takes, where `is_whole` says that the whole storage is kept."""
        taken = np.where(is_whole, whole, kept)
        return np.where(self.rest, whole - taken, taken)


def components(size: int, tails: NDArray[np.int32], heads: NDArray[np.int32]) -> NDArray[np.int64]:
    """By vertex, the lowest vertex of its connected component."""
    label = np.arange(size)
    while True:
        before = label.copy()
        least = np.minimum(label[tails], label[heads])
        np.minimum.at(label, tails, least)
        np.minimum.at(label, heads, least)
        label = label[label]
        if np.array_equal(label, before):
            return label


def time_point(needs: Needs, rank: int) -> TimePoint:
    """The network at the first run of `rank`."""
    return _Network(needs, rank).time_point()


class _Arc(NamedTuple):
    tail: int
    head: int
    infinite: bool = False
    rest: bool = False
    storage: int = -1
    seconds: float = 0.0
    nbytes: float = 0.0
    kept_seconds: float = 0.0
    kept_bytes: float = 0.0


class _Network:
    def __init__(self, needs: Needs, rank: int) -> None:
        self.needs, self.rank = needs, rank
        self.arcs: list[_Arc] = []
        self.vertices: dict[tuple[str, int], int] = {}
        self.made_by: dict[int, int] = {}
        self.todo: list[int] = []
        self.always: set[int] = set()
        self.here = self._live_in_run()

    def time_point(self) -> TimePoint:
        needs, rank = self.needs, self.rank
        table = needs.table
        wanted: list[int] = []
        for storage, made in needs.maker.items():
            if made <= rank and storage not in self.here:
                following = needs.next_read(storage, rank)
                if following is not None:
                    if needs.stays(storage, rank, following):
                        self.always.add(storage)
                    else:
                        wanted.append(storage)
        for storage in wanted:
            vertex = self._needed(storage, whole=needs.is_read_whole(storage, rank))
            self.arcs.append(_Arc(SOURCE, vertex, infinite=True))
        while self.todo:
            self._run(self.todo.pop())
        fixed = table.static_bytes + table.plain[rank].workspace_bytes + needs.pinned_bytes[rank]
        fixed += sum(needs.nbytes[s] for s in self.here | self.always)
        later = (s for s in self.here if needs.next_read(s, rank) is not None)
        return TimePoint(
            rank=rank,
            fixed_bytes=fixed,
            always=tuple(sorted(self.always.union(later))),
            num_vertices=2 + len(self.vertices),
            tails=np.array([arc.tail for arc in self.arcs], dtype=np.int32),
            heads=np.array([arc.head for arc in self.arcs], dtype=np.int32),
            infinite=np.array([arc.infinite for arc in self.arcs], dtype=np.bool_),
            rest=np.array([arc.rest for arc in self.arcs], dtype=np.bool_),
            arc_storage=np.array([arc.storage for arc in self.arcs], dtype=np.int64),
            arc_seconds=np.array([arc.seconds for arc in self.arcs], dtype=np.float64),
            arc_bytes=np.array([arc.nbytes for arc in self.arcs], dtype=np.float64),
            kept_seconds=np.array([arc.kept_seconds for arc in self.arcs], dtype=np.float64),
            kept_bytes=np.array([arc.kept_bytes for arc in self.arcs], dtype=np.float64),
        )

    def _live_in_run(self) -> set[int]:
        """The storages that the run itself reads and makes."""
        needs = self.needs
        op = needs.table.plain[self.rank]
        made = {s for s, _, is_pinned in op.fresh if not is_pinned}
        return made.union(*(needs.required[read] for read in op.reads))

    def _needed(self, storage: int, *, whole: bool) -> int:
        """The vertex of a storage that is needed later: the `whole` storage, or at least its packed form."""
        if not whole or self.needs.packed_form(storage, self.rank) is None:
            return self._present(storage)
        name = ("whole", storage)
        if name not in self.vertices:
            present = self._present(storage)
            vertex = self.vertices[name] = 2 + len(self.vertices)
            self.arcs.append(_Arc(vertex, present, infinite=True))
            self.arcs.append(self._keeping(storage, vertex, self.made_by[storage], rest=True))
        return self.vertices[name]

    def _present(self, storage: int) -> int:
        """The vertex of a storage, or its packed form, that is needed later."""
        name = ("storage", storage)
        if name not in self.vertices:
            vertex = self.vertices[name] = 2 + len(self.vertices)
            needs = self.needs
            group = needs.group_of.get(storage)
            may_run = group is not None and needs.may_be_made(group, self.rank, needs.table.size)
            self.made_by[storage] = self._made(storage, group) if may_run and group is not None else SINK
            self.arcs.append(self._keeping(storage, vertex, self.made_by[storage], rest=False))
        return self.vertices[name]

    def _keeping(self, storage: int, tail: int, head: int, *, rest: bool) -> _Arc:
        """The arc whose cut keeps `storage` or its packed form live; or the `rest` beyond the packed form."""
        nbytes = float(self.needs.nbytes[storage])
        packed = self.needs.packed_form(storage, self.rank)
        return _Arc(
            tail,
            head,
            rest=rest,
            storage=storage,
            nbytes=nbytes,
            kept_seconds=0.0 if packed is None else packed.seconds,
            kept_bytes=nbytes if packed is None else packed.nbytes,
        )

    def _made(self, storage: int, group: int) -> int:
        """The vertex of a storage that is made anew later, with the views that are taken again."""
        views = self.needs.view_seconds(storage, self.rank)
        if not views:
            return self._running(group)
        vertex = self.vertices["made", storage] = 2 + len(self.vertices)
        self.arcs.append(_Arc(vertex, SINK, seconds=views, kept_seconds=views))
        self.arcs.append(_Arc(vertex, self._running(group), infinite=True))
        return vertex

    def _running(self, group: int) -> int:
        """The vertex of a group of which some remat runs later."""
        name = ("group", group)
        if name not in self.vertices:
            self.vertices[name] = 2 + len(self.vertices)
            self.todo.append(group)
        return self.vertices[name]

    def _run(self, number: int) -> None:
        needs = self.needs
        group, vertex = needs.groups[number], self.vertices["group", number]
        self.arcs.append(_Arc(vertex, SINK, seconds=group.seconds, kept_seconds=group.seconds))
        if group.within is not None:
            self.arcs.append(_Arc(vertex, self._running(group.within), infinite=True))
        for storage in group.needs:
            made = needs.maker.get(storage)
            if made is None or made > self.rank or storage in self.here or storage in self.always:
                continue
            if needs.group_of.get(storage) != number:
                there = self._needed(storage, whole=storage in group.whole)
                self.arcs.append(_Arc(vertex, there, infinite=True))
