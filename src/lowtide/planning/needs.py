"""When a step needs which storages, and which remats can make them anew.

Bounds count storages, not values: a value needs a block of each storage that it refers to, and a block is
made by a first run or by a remat. So a bound is valid for every choice of remats.

Remats that make a common storage form one `Group`. A bound uses only facts that are true of each of them:
the least seconds, and the storages that each of them reads or makes.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lowtide.planning.search.table import StorageValues, Table


@dataclass(frozen=True, slots=True)
class PackedForm:
    """The packed form of a storage: its bytes, the seconds to pack and unpack, and since when it is live.

    `remat` unpacks it, the cheapest one; the other figures are the minima of all.
    """

    nbytes: float
    seconds: float
    since: int
    remat: int


@dataclass(frozen=True, slots=True)
class Group:
    """Remats of which at least one runs. `seconds` are those beyond the seconds of group `within`."""

    seconds: float
    needs: tuple[int, ...]
    """storages that each of these remats reads or makes"""
    whole: frozenset[int]
    """the needs that must be whole, not packed"""
    within: int | None
    segments: frozenset[int]


@dataclass(frozen=True)
class Needs:
    """The storages of a step that are neither static nor pinned, and what every run needs of them.

    `required[r]`: storages that each value of rank `r` refers to. `readers[s]`: ranks whose first runs need
    storage `s`. `group_of[s]`: the group whose remats make it. `slots`: by segment, the first and the last
    rank before which its forward nodes may be rematerialized.
    """

    table: Table
    nbytes: tuple[int, ...]
    maker: dict[int, int]
    required: tuple[frozenset[int], ...]
    readers: dict[int, tuple[int, ...]]
    groups: tuple[Group, ...]
    group_of: dict[int, int]
    packed_forms: dict[int, PackedForm]
    whole: dict[int, tuple[tuple[int, int], ...]]
    """by storage with a packed form, ranks whose values unpacking cannot give, each with its last reader"""
    slots: dict[int, tuple[int, int]]
    pinned_bytes: tuple[int, ...]
    """by rank, pinned bytes after its first run"""
    views: dict[int, tuple[tuple[int, int, float], ...]]
    """by storage, its views: (rank, last first run that reads it, seconds)"""
    views_again: dict[int, tuple[tuple[int, float], ...]]
    """by storage, the views through which every remat reads it: (rank, seconds)"""
    span: tuple[int, int]
    """the first and the last rank between which a plan has a choice"""

    @cached_property
    def fixed_bytes(self) -> NDArray[np.int64]:
        """By rank, bytes that are live during its first run in every schedule."""
        table = self.table
        change = np.zeros(table.size + 1, dtype=np.int64)
        for storage, made in self.maker.items():
            nbytes = self.nbytes[storage]
            uses = [made, *self.readers.get(storage, ())]
            for use, following in pairwise([*uses, uses[-1]]):
                # live during the use, and after it until a remat could make it anew
                until = following if self.stays(storage, use, following) else use + 1
                change[use] += nbytes
                change[max(until, use + 1)] -= nbytes
        alone = [op.workspace_bytes for op in table.plain]
        fixed: NDArray[np.int64] = (
            np.cumsum(change)[:-1] + np.array(self.pinned_bytes) + np.array(alone) + table.static_bytes
        )
        fixed[sorted(table.on_demand)] = 0
        return fixed

    def stays(self, storage: int, after: int, following: int) -> bool:
        """Whether no remat can make `storage` anew after rank `after`, before `following` has run."""
        packed, group = self.packed_forms.get(storage), self.group_of.get(storage)
        if packed is not None and packed.since <= after:
            return False
        return group is None or not self.may_be_made(group, after, following)

    def packed_form(self, storage: int, rank: int) -> PackedForm | None:
        """The packed form of `storage` that can be live at the first run of `rank`."""
        packed = self.packed_forms.get(storage)
        return None if packed is None or packed.since > rank else packed

    def view_seconds(self, storage: int, rank: int) -> float:
        """The least seconds of views when `storage` is made anew after the first run of `rank`.

        Views that first runs read later count; where only remats read the storage, those that each remat
        reads.
        """
        if self.next_read(storage, rank) is None:
            return sum(seconds for view, seconds in self.views_again.get(storage, ()) if view <= rank)
        return sum(s for view, last, s in self.views.get(storage, ()) if view <= rank < last)

    def is_read_whole(self, storage: int, rank: int) -> bool:
        """Whether a first run after that of `rank` reads `storage` by a value that unpacking cannot give."""
        return any(value <= rank < last for value, last in self.whole.get(storage, ()))

    def next_read(self, storage: int, rank: int) -> int | None:
        """The first rank after `rank` whose first run needs `storage`."""
        readers = self.readers.get(storage, ())
        i = bisect_right(readers, rank)
        return readers[i] if i < len(readers) else None

    def may_be_made(self, group: int, after: int, before: int) -> bool:
        """Whether a remat of `group` may run after rank `after` and before rank `before` has run."""
        return any(
            max(after + 1, first) <= min(before, last)
            for first, last in (self.slots[s] for s in self.groups[group].segments if s in self.slots)
        )


def needs_of(table: Table) -> Needs:
    """All that serves every time point and every budget."""
    storages = table.step.storages
    free = [not storage.static and not storage.pinned for storage in storages]
    maker: dict[int, int] = {}
    pinned_bytes: list[int] = []
    pinned = 0
    values = StorageValues(table)
    required = [frozenset(s for s in needed if free[s]) for needed in values.required]
    readers: dict[int, list[int]] = {}
    for node, op in zip(table.step.nodes, table.plain, strict=True):
        for storage in node.makes:
            maker.setdefault(storage, node.rank)
        if not node.on_demand:
            pinned += sum(nbytes for _, nbytes, is_pinned in op.fresh if is_pinned)
        pinned_bytes.append(pinned)
        if not node.on_demand:
            for storage in {s for read in op.reads for s in required[read]}:
                readers.setdefault(storage, []).append(node.rank)
    slots: dict[int, tuple[int, int]] = {}
    for rank, segment in enumerate(table.slot_segment):
        if segment >= 0:
            slots[segment] = (slots.get(segment, (rank, rank))[0], rank)
    packed_forms, unpacking = _packed_forms(table)
    served = _Served(table, unpacking)
    groups, group_of = _groups(values, required, frozenset(unpacking), free, served)
    return Needs(
        table=table,
        nbytes=tuple(storage.nbytes for storage in storages),
        maker={s: rank for s, rank in maker.items() if free[s]},
        required=tuple(required),
        readers={s: tuple(ranks) for s, ranks in readers.items()},
        groups=tuple(groups),
        group_of=group_of,
        packed_forms=packed_forms,
        whole=_read_whole(table, required, packed_forms, served),
        slots=slots,
        pinned_bytes=tuple(pinned_bytes),
        views=_views(values),
        views_again=_views_again(values),
        span=(
            min((maker[s] for s in (*group_of, *packed_forms)), default=0),
            max((last for _, last in slots.values()), default=-1),
        ),
    )


def _views(values: StorageValues) -> dict[int, tuple[tuple[int, int, float], ...]]:
    """By storage, the views that first runs of the backward pass read."""
    table = values.table
    last: dict[int, int] = {}
    for op in table.plain[table.first_backward :]:
        for read in op.reads:
            for view in filter(values.is_view, values.views(read)):
                last[view] = op.rank
    found: dict[int, list[tuple[int, int, float]]] = {}
    for view, reader in sorted(last.items()):
        storage = min(values.required[view], default=None)
        if storage is not None:
            found.setdefault(storage, []).append((view, reader, values.view_seconds(view)))
    return {storage: tuple(views) for storage, views in found.items()}


def _views_again(values: StorageValues) -> dict[int, tuple[tuple[int, float], ...]]:
    """By storage that remats read, the views through which all of them read it."""
    found: dict[int, set[int]] = {}
    for op in values.table.remats:
        if op.fresh:
            by_storage: dict[int, set[int]] = {s: set() for read in op.reads for s in values.required[read]}
            for read in op.reads:
                for view in filter(values.is_view, values.views(read)):
                    storage = min(values.required[view], default=None)
                    if storage is not None:
                        by_storage.setdefault(storage, set()).add(view)
            for storage, views in by_storage.items():
                found[storage] = found[storage] & views if storage in found else views
    return {
        storage: tuple((view, values.view_seconds(view)) for view in sorted(views))
        for storage, views in found.items()
        if views
    }


def _packed_forms(table: Table) -> tuple[dict[int, PackedForm], set[int]]:
    """Storages with a packed form, and the numbers of the remats that unpack.

    Where several storages come from one packed form, each pays its share of the bytes and seconds.
    """
    found: dict[int, list[tuple[int, frozenset[int]]]] = {}
    for number, op in enumerate(table.remats):
        if op.fresh and op.reads and all(read in table.on_demand for read in op.reads):
            for storage, _, _ in op.fresh:
                found.setdefault(storage, []).append((number, frozenset(op.reads)))
    sharers: dict[int, set[int]] = {}
    for storage, remats in found.items():
        for number, reads in remats:
            for read in reads:
                sharers.setdefault(read, set()).update(
                    (storage, *(s for s, _, _ in table.remats[number].fresh))
                )
    packed_forms: dict[int, PackedForm] = {}
    for storage, remats in found.items():
        options = [
            PackedForm(
                nbytes=sum(
                    nbytes / len(sharers[read]) for read in reads for _, nbytes, _ in table.plain[read].fresh
                ),
                seconds=table.remats[number].seconds / len(table.remats[number].fresh)
                + sum(table.plain[read].seconds / len(sharers[read]) for read in reads),
                since=max(reads),
                remat=number,
            )
            for number, reads in remats
        ]
        packed_forms[storage] = PackedForm(
            nbytes=min(o.nbytes for o in options),
            seconds=min(o.seconds for o in options),
            since=min(o.since for o in options),
            remat=min(options, key=lambda o: (o.nbytes, o.seconds, o.remat)).remat,
        )
    return packed_forms, {number for remats in found.values() for number, _ in remats}


class _Served:
    """The values that unpacking can give.

    A run of a rank makes its value. A run before a time point keeps its block live there. A run after the
    time point unpacks the block, or refers to a value that unpacking can give.
    """

    def __init__(self, table: Table, unpacking: set[int]) -> None:
        self._table, self._unpacking = table, unpacking
        self._known: dict[tuple[int, int], bool] = {}

    def __call__(self, rank: int, storage: int) -> bool:
        """Whether unpacking can give `rank` its block of `storage`."""
        found, todo = {rank}, [rank]
        while todo and (rank, storage) not in self._known:
            last = todo.pop()
            if self._known.get((last, storage)) or not self._unpacking.isdisjoint(self._table.again[last]):
                self._known[rank, storage] = True
            providers = {u for n in self._table.again[last] for u in self._providers(n, storage)} - found
            found |= providers
            todo += sorted(providers)
        if (rank, storage) not in self._known:
            self._known.update(((other, storage), False) for other in found)
        return self._known[rank, storage]

    def _providers(self, number: int, storage: int) -> Iterable[int]:
        """The ranks from whose values a remat can take its block of `storage`."""
        return (u for s, providers in self._table.remats[number].shared if s == storage for u in providers)


def _read_whole(
    table: Table, required: list[frozenset[int]], packed_forms: dict[int, PackedForm], served: _Served
) -> dict[int, tuple[tuple[int, int], ...]]:
    """Reads by first runs of storages with a packed form, through values that unpacking cannot give."""
    found: dict[int, dict[int, int]] = {}
    for op in table.plain:
        if op.rank not in table.on_demand:
            for read in op.reads:
                for storage in required[read]:
                    if storage in packed_forms and not served(read, storage):
                        found.setdefault(storage, {})[read] = op.rank
    return {storage: tuple(sorted(reads.items())) for storage, reads in found.items()}


def _groups(
    values: StorageValues,
    required: list[frozenset[int]],
    left_out: frozenset[int],
    free: list[bool],
    served: _Served,
) -> tuple[list[Group], dict[int, int]]:
    table = values.table
    remats: dict[int, list[int]] = {}
    for storage in sorted(values.readers):
        mine = [number for number in values.remats_of(storage) if number not in left_out]
        if free[storage] and mine:
            remats[storage] = mine
    parent: dict[int, int] = {}

    def root(number: int) -> int:
        while parent.setdefault(number, number) != number:
            number = parent[number]
        return number

    for numbers in remats.values():
        for number in numbers:
            parent[root(number)] = root(numbers[0])
    members: dict[int, list[int]] = {}
    for number in sorted(parent):
        members.setdefault(root(number), []).append(number)
    by_root: dict[int, list[int]] = {}
    for storage in sorted(remats):
        by_root.setdefault(root(remats[storage][0]), []).append(storage)
    groups: list[Group] = []
    group_of: dict[int, int] = {}
    for top in sorted(members):
        # From all remats of the group down to those of single storages, each within the one before.
        chain: list[tuple[frozenset[int], int]] = []
        smaller = sorted((frozenset(remats[s]) for s in by_root[top]), key=_largest)
        for some in (frozenset(members[top]), *smaller):
            if chain and not some < chain[-1][0]:
                continue
            before = _least_seconds(table, chain[-1][0]) if chain else 0.0
            ops = [table.remats[number] for number in some]
            made = {number: {s for s in by_root[top] if number in remats[s]} for number in some}
            read = {
                number: [(r, s) for r in table.remats[number].reads for s in required[r]] for number in some
            }
            groups.append(
                Group(
                    seconds=_least_seconds(table, some) - before,
                    needs=tuple(sorted(_common([made[n].union(s for _, s in read[n]) for n in some]))),
                    whole=_common([made[n].union(s for r, s in read[n] if not served(r, s)) for n in some]),
                    within=chain[-1][1] if chain else None,
                    segments=frozenset(table.segment[op.rank] for op in ops),
                )
            )
            chain.append((some, len(groups) - 1))
        for storage in by_root[top]:
            own = frozenset(remats[storage])
            group_of[storage] = next(number for some, number in reversed(chain) if own <= some)
    return groups, group_of


def _largest(numbers: frozenset[int]) -> tuple[int, list[int]]:
    return -len(numbers), sorted(numbers)


def _least_seconds(table: Table, numbers: frozenset[int]) -> float:
    return min(table.remats[number].seconds for number in numbers)


def _common(touched: list[set[int]]) -> frozenset[int]:
    return frozenset(set.intersection(*touched))
