"""A step as a problem of the compiled search; sequences of ops as schedules and back, and the best of them.

`Archive` is the Pareto front of peaks and seconds: for every peak the cheapest schedule that was ever seen.
One archive serves all budgets of a step. That makes planning monotone: a larger budget chooses among more
of the same schedules.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from lowtide.facts import Region, Run
from lowtide.planning.schedules import without_needless_runs
from lowtide.planning.search.problem import Classes, Ints, OpRow, Problem, View, flatten, single_classes
from lowtide.planning.search.table import RematSet, Rerun, StorageValues, Table, demanded, remats_in
from lowtide.planning.simulate import Timeline, simulate


@dataclass(frozen=True, slots=True, eq=False)
class ArchiveEntry:
    """A schedule as a sequence of ops of the step's problem."""

    peak_bytes: int
    seconds: float
    order: Ints

    @property
    def price(self) -> float:
        return self.seconds


class Planned(Protocol):
    """Anything with a peak and a price: the seconds that it adds, and a tie-break."""

    @property
    def peak_bytes(self) -> int: ...
    @property
    def price(self) -> Any: ...


Some = TypeVar("Some", bound=Planned)


class Archive(Generic[Some]):
    """The Pareto front of all recorded (peak, price), by rising peak and falling price."""

    def __init__(self) -> None:
        self.entries: list[Some] = []

    def best(self, budget_bytes: int) -> Some | None:
        """The cheapest entry whose peak is at most `budget_bytes`."""
        i = bisect_right(self.entries, budget_bytes, key=lambda e: e.peak_bytes)
        return self.entries[i - 1] if i else None

    def above(self, budget_bytes: int) -> Some | None:
        """The entry with the lowest peak above `budget_bytes`."""
        i = bisect_right(self.entries, budget_bytes, key=lambda e: e.peak_bytes)
        return self.entries[i] if i < len(self.entries) else None

    def replace(self, entry: Some, by: Some) -> None:
        """Put another one in the place of `entry`."""
        self.entries.remove(entry)
        self.add(by)

    def add(self, entry: Some) -> bool:
        """Keep an entry if none with at most its peak is as cheap; True when kept."""
        there = self.best(entry.peak_bytes)
        if there is not None and there.price <= entry.price:
            return False
        i = bisect_right(self.entries, entry.peak_bytes, key=lambda e: e.peak_bytes)
        if i and self.entries[i - 1].peak_bytes == entry.peak_bytes:
            i -= 1
        j = i
        while j < len(self.entries) and self.entries[j].price >= entry.price:
            j += 1
        self.entries[i:j] = [entry]
        return True


REPAIR_MOVES, REPAIR_MOVES_PER_OP = 6000, 2
"""Moves of annealing to repair a schedule: so many, and so many more for each op."""
REPAIR_WARMTHS = (0.05, 0.5)
"""How warm these searches start: one keeps most of the schedule, one may leave it."""


class StepProblem:
    """The problem of one step, and the way back from sequences to runs.

    A first run that makes nothing is left out where a later op reads all that it reads: it changes no live
    range. All first runs of the optimizer are one op: no plan changes their live bytes.
    """

    def __init__(self, table: Table, plain: Timeline) -> None:
        self.table, self._values = table, StorageValues(table)
        self._view_numbers: dict[int, int] = {}
        self._views: list[View] = []
        self._first_runs = [Run(rank) for rank in range(table.size)]
        self._classes = Classes(self._values)
        first, self.ranks = self._first_ops()
        again, self.remats = self._remats()
        storages = table.step.storages
        made = {storage for row in first for storage in row.makes}
        self.problem: Problem = flatten(
            first,
            again,
            views=self._views,
            nbytes=[storage.nbytes for storage in storages],
            pinned=[storage.pinned and storage.id in made for storage in storages],
            static_bytes=table.static_bytes,
            classes=self._classes.all,
        )
        self._op_of_remat = {number: len(first) + i for i, number in enumerate(self.remats)}
        self._op_of_rank = {rank: i for i, rank in enumerate(self.ranks)}
        by_number = {number: view for view, number in self._view_numbers.items()}
        self._read_views = [
            [(view, self._blocks(view, row.classes)) for view in map(by_number.__getitem__, row.views)]
            for row in (*first, *again)
        ]
        self._made_blocks = {number: self._classes.made(number) for number in self.remats}
        self._give_the_optimizer_its_bytes(plain)

    @cached_property
    def without_kept(self) -> Problem | None:
        """The problem without remats that only unpack; None where there is none."""
        table = self.table
        kept = frozenset(
            self._op_of_remat[number]
            for number in self.remats
            if table.remats[number].reads and table.on_demand.issuperset(table.remats[number].reads)
        )
        return self.problem.without(kept) if kept else None

    def _first_ops(self) -> tuple[list[OpRow], list[int]]:
        table, values = self.table, self._values
        rows: list[OpRow] = []
        ranks: list[int] = []
        later: set[int] = set()
        last_reader = self._last_readers()
        for node, op in zip(table.step.nodes, table.plain, strict=True):
            if node.region is Region.OPTIMIZER:
                later.update(s for read in op.reads for s in values.required[read])
                continue
            made = tuple(s for s, _, _ in op.fresh)
            if not made and not op.workspace_bytes and node.rank not in last_reader:
                continue
            is_forward = node.rank < table.first_backward
            nodes = table.step.nodes if is_forward else None
            read = {s for r in op.reads for s in (nodes[r].holds if nodes else values.required[r])}
            rows.append(
                OpRow(
                    reads=tuple(sorted(s for s in read if values.is_dynamic[s])),
                    makes=made,
                    seconds=op.seconds if node.on_demand else 0.0,
                    workspace_bytes=op.workspace_bytes,
                    slot=table.slot_segment[node.rank],
                    optional=node.on_demand,
                    views=() if is_forward else self._numbers(op.reads),
                    classes={} if is_forward else self._classes.read(op.reads),
                )
            )
            ranks.append(node.rank)
        made_before = {storage for row in rows for storage in row.makes}
        rows.append(OpRow(reads=tuple(sorted(later & made_before)), makes=()))
        ranks.append(table.size)
        return rows, ranks

    def _last_readers(self) -> set[int]:
        """Ranks that are the last to read some storage in the step, or in its forward pass.

        Until there, the storage cannot be rematerialized.
        """
        nodes, values = self.table.step.nodes, self._values
        last: dict[tuple[int, bool], int] = {}
        for op in self.table.plain:
            is_forward = op.rank < self.table.first_backward
            for read in op.reads:
                dynamic = [s for s in nodes[read].holds if values.is_dynamic[s]]
                last.update(((s, is_forward), op.rank) for s in dynamic)
        return set(last.values())

    def timeline(self, sequence: Ints) -> Timeline:
        """Bytes and seconds of a sequence, by the simulator."""
        step = self.table.step
        return simulate(step, without_needless_runs(step, self.runs(sequence)))

    def _remats(self) -> tuple[list[OpRow], list[int]]:
        """Remats that serve readers of some storage. Other storages that they make are workspace."""
        table, values = self.table, self._values
        rows: list[OpRow] = []
        for number, classes in sorted(self._classes.served.items()):
            op = table.remats[number]
            made = sorted(classes)
            besides = sum(nbytes for s, nbytes, _ in op.fresh if s not in made)
            rows.append(
                OpRow(
                    reads=tuple(sorted({s for r in op.reads for s in values.required[r]})),
                    makes=tuple(made),
                    seconds=op.seconds,
                    workspace_bytes=op.workspace_bytes + besides,
                    slot=table.segment[op.rank],
                    optional=True,
                    views=self._numbers(op.reads),
                    classes={**self._classes.read(op.reads), **classes},
                )
            )
        return rows, sorted(self._classes.served)

    def _blocks(self, view: int, classes: dict[int, int]) -> list[list[tuple[int, int]]]:
        """The blocks, as (storage, class), through which readers of these classes may read a view.

        One list for each class of a storage that has several.
        """
        storages = sorted(self._values.required[view])
        several = [s for s in storages if s in self._classes.all]
        if not several:
            return [[(s, 1) for s in storages]]
        rest = [(s, 1) for s in storages if s not in self._classes.all]
        return [
            [*rest, (s, one)]
            for s in several
            for one in single_classes(classes.get(s, 0) & self._classes.through(view, s))
        ]

    def _numbers(self, reads: Iterable[int]) -> tuple[int, ...]:
        """Numbers of the views through which these ranks are read."""
        found: set[int] = set()
        for read in reads:
            for view in self._values.views(read):
                storage = min(self._values.required[view], default=None)
                if storage is not None:
                    if view not in self._view_numbers:
                        self._view_numbers[view] = len(self._views)
                        self._views.append(View(storage, self._values.view_seconds(view)))
                    found.add(self._view_numbers[view])
        return tuple(sorted(found))

    def _give_the_optimizer_its_bytes(self, plain: Timeline) -> None:
        nodes = self.table.step.nodes
        live_bytes = [
            int(nbytes)
            for run, nbytes in zip(plain.runs, plain.live_bytes, strict=True)
            if nodes[run.rank].region is Region.OPTIMIZER
        ]
        last = self.problem.live_bytes(self.sequence(()))[-1]
        self.problem.workspace_bytes[self.problem.num_first - 1] = max(
            0, max(live_bytes, default=0) - int(last)
        )

    def sequence(self, remats: Iterable[Rerun]) -> Ints:
        """A set of remats as a sequence of ops."""
        place = self.table.place
        again = sorted((slot, place[remat], remat) for slot, remat in remats if remat in self._op_of_remat)
        order: list[int] = []
        due = 0
        for slot, _, remat in again:
            before = bisect_left(self.ranks, slot)
            order += range(due, before)
            due = before
            order.append(self._op_of_remat[remat])
        order += range(due, len(self.ranks))
        return np.array(order, dtype=np.int32)

    def sequence_of(self, runs: Sequence[Run]) -> Ints:
        """A schedule as a sequence of ops. KeyError where the step has no such remats."""
        return self.sequence(remats_in(self.table, runs))

    def repaired(self, runs: Sequence[Run], *, budget_bytes: int) -> Ints | None:
        """A sequence within the budget, close to a schedule that was made for the same ops with other sizes.

        The plain order where that fits, else the better of two short searches from that schedule. None where
        neither fits.
        """
        plain = self.sequence(())
        if not self.problem.evaluate(plain, budget_bytes).excess_bytes:
            return plain
        start, num_ops = self.sequence_of(runs), len(self.problem.seconds)
        found = [
            self.problem.anneal(
                start,
                budget_bytes=budget_bytes,
                moves=REPAIR_MOVES + REPAIR_MOVES_PER_OP * num_ops,
                warmth=warmth,
            )
            for warmth in REPAIR_WARMTHS
        ]
        figures, order = min(found, key=lambda pair: (pair[0].excess_bytes, pair[0].seconds))
        return None if figures.excess_bytes else order

    def remat_set(self, sequence: Ints) -> RematSet:
        """The remats of a sequence."""
        num_first = self.problem.num_first
        found: set[Rerun] = set()
        due = 0
        for op in sequence.tolist():
            if op < num_first:
                due = op + 1
            else:
                found.add((self.ranks[due], self.remats[op - num_first]))
        return frozenset(found)

    def added_seconds(self, sequence: Ints) -> float:
        """The seconds that a sequence adds, summed up as the simulator does: equal schedules, equal
        seconds."""
        table, num_first = self.table, self.problem.num_first
        ops = sequence.tolist()
        again = [self.remats[op - num_first] for op in ops if op >= num_first]
        views = [number for numbers in self._views_after(ops).values() for number in numbers]
        kept = demanded(table, [(0, number) for number in again])
        seconds = [table.remats[number].seconds for number in (*again, *views)]
        return fsum([*seconds, *(table.plain[rank].seconds for rank in sorted(kept))])

    def runs(self, sequence: Ints) -> tuple[Run, ...]:
        """A sequence as runs of the step, with the views and parts of the storages that it rematerializes."""
        table, num_first = self.table, self.problem.num_first
        ops = sequence.tolist()
        views = self._views_after(ops)
        absent = table.on_demand - demanded(
            table, [(0, self.remats[op - num_first]) for op in ops if op >= num_first]
        )
        found: list[Run] = []
        waiting: list[Run] = []
        back: set[int] = set()
        due = 0
        for position, op in enumerate(ops):
            if op >= num_first:
                remats = [table.remats[n] for n in (self.remats[op - num_first], *views.get(position, ()))]
                waiting += [Run(remat.rank, remat.rule) for remat in remats]
                back.update(remat.rank for remat in remats)
                continue
            rank = self.ranks[op]
            if waiting:
                # right before the op, or before a view on the way to it that refers to what comes back
                on_the_way = range(due, min(rank, table.size))
                where = next((r for r in on_the_way if not back.isdisjoint(table.plain[r].reads)), rank)
                found += self._first_runs[due:where]
                found += waiting
                waiting.clear()
                back.clear()
                due = max(due, where)
            found += self._first_runs[due : rank + 1]
            due = max(due, rank + 1)
        return tuple(run for run in found if run.rule or run.rank not in absent)

    def _is_view_of(self, view: int, rank: int) -> bool:
        """Whether a view must be taken again after a remat of `rank`; not where that remat gives the view."""
        return view != rank and rank in self._values.way_back(view)

    def _views_after(self, ops: Sequence[int]) -> dict[int, list[int]]:
        """By position of a remat in the sequence, the remats of the views that must follow it, in a valid
        order.

        A view must follow where an op reads it before its storage is rematerialized once more.
        """
        table, num_first = self.table, self.problem.num_first
        take_again = self._values.view_remat
        latest: dict[tuple[int, int], int] = {}
        made_by: dict[int, int] = {}
        wanted: dict[int, set[int]] = {}
        begin = next((position for position, op in enumerate(ops) if op >= num_first), len(ops))
        for position in range(begin, len(ops)):
            op = ops[position]
            first = op < num_first
            for view, options in self._read_views[op]:
                for blocks in options:
                    made = [latest[block] for block in blocks if block in latest]
                    if made and self._is_view_of(view, made_by[max(made)]):
                        wanted.setdefault(max(made), set()).add(view)
            if not first:
                number = self.remats[op - num_first]
                made_by[position] = table.remats[number].rank
                latest.update((block, position) for block in self._made_blocks[number])
        return {
            position: sorted(
                (n for v in views if (n := take_again[v]) is not None), key=table.place.__getitem__
            )
            for position, views in wanted.items()
        }
