"""The default planner: one search along the border between bytes and seconds, for all budgets at once.

Every plan that is worth having goes into an archive, from which a budget takes the cheapest that fits; the
plans of the other planners are there too, so that it is never worse than any of them. All limits are
counts of moves, never of time, and the random numbers are seeded, so that the same step always gives the
same archive.

1. Levels of bytes fall from the plain peak to the proven floor. At each, annealing starts from the best of
   the plan of the level before, the plans of others, and the cuts that prove the level's bound: those say
   what to keep at one moment, which is nearly all that matters at most levels.
2. Below the last level that was reached, the steps shrink until they fail.
3. Back up the levels, each from the plan below it.
4. Between two plans of the archive, a few rungs are worked out when a budget first asks for them. Their
   seconds stay between those of the two, and each rung starts from the one below: so a larger budget is
   never slower, whichever budgets are asked for and in whatever order.
"""

from collections.abc import Callable, Iterable, Sequence

from lowtide.planning.anneal.problem import Ints
from lowtide.planning.anneal.steps import StepProblem
from lowtide.planning.bounds.curve import Bounds
from lowtide.planning.search.archive import Archive, Entry
from lowtide.planning.search.lazy import lazy_plan
from lowtide.planning.search.runs import Rerun

NUM_LEVELS = 16
NUM_RUNGS = 6
MOVES_PER_OP = 120
"""Moves of annealing for each op of a step, at each level."""
MIN_MOVES = 4000
"""Moves that large steps get at least."""
MAX_WORK = 1_000_000_000
"""Moves at each level times the square of ops: large steps get fewer moves, each of which takes longer."""
WARMTHS = (0.05, 0.5)
"""How warm annealing starts: coldly it keeps what is good in its start, warmly it leaves it."""
SHORT = 8
"""Starts are compared by what this part of the moves makes of them."""
NUM_MOMENTS = 2
"""Moments whose cuts are tried at each level."""
FLOOR_WARMTHS = (0.5, 3.0, 3.0, 3.0)
"""How warm the search for the floor starts, where only plans far from all others may fit."""
FLOOR_MOVES = 10_000
"""Moves there, for small steps."""
NUM_FAILURES = 4
"""Levels below the lowest plan that may fail before the floor is believed."""


class Auto:
    """The plans of one step for all budgets."""

    def __init__(
        self,
        steps: StepProblem,
        bounds: Bounds,
        others: Iterable[frozenset[Rerun]],
        suggest: Callable[[int], frozenset[Rerun] | None],
    ) -> None:
        """`others` are plans that must not be better; `suggest` gives one for a level, if there is any."""
        self._steps, self._bounds, self._suggest = steps, bounds, suggest
        self._uses = frozenset(steps.table.uses)
        self.archive: Archive[Entry] = Archive()
        self._rungs: dict[int, list[Entry]] = {}
        for plan in (frozenset(), *others):
            self._record(steps.sequence(plan))
        if steps.recipes:
            levels = self._levels()
            self._walk_down(levels)
            self._look_for_the_floor()
            self._walk_up(levels)

    def best(self, budget_bytes: int) -> Entry | None:
        """The cheapest plan whose peak is at most `budget_bytes`."""
        entry = self.archive.best(budget_bytes)
        above = self.archive.above(budget_bytes)
        if entry is None or above is None:
            return entry
        if entry.peak_bytes not in self._rungs:
            self._rungs[entry.peak_bytes] = [entry]
        rungs = self._rungs[entry.peak_bytes]
        gap = above.peak_bytes - entry.peak_bytes
        levels = [entry.peak_bytes + gap * i // NUM_RUNGS for i in range(NUM_RUNGS)]
        while len(rungs) < NUM_RUNGS and levels[len(rungs)] <= budget_bytes:
            last = rungs[-1]
            found = self._anneal(last.order, levels[len(rungs)], least_seconds=above.seconds)
            is_better = found is not None and above.seconds <= found.seconds < last.seconds
            rungs.append(found if found is not None and is_better else last)
        return [rung for rung, level in zip(rungs, levels, strict=False) if level <= budget_bytes][-1]

    def _levels(self) -> list[int]:
        """Budgets below the plain peak, from high to low."""
        low, high = self._bounds.floor_bytes, self.archive.entries[-1].peak_bytes
        levels = {high - (high - low) * i // NUM_LEVELS for i in range(1, NUM_LEVELS + 1)}
        return sorted(levels, reverse=True)

    def _walk_down(self, levels: list[int]) -> None:
        order = self.archive.entries[-1].order
        for level in levels:
            found = self._anneal(self._best_start(order, level), level)
            if found is not None:
                self.archive.add(found)
                order = found.order

    def _walk_up(self, levels: list[int]) -> None:
        """Give what lower plans save, level by level: they may lead where no higher one does."""
        for level in reversed(levels):
            below = self.archive.best(level)
            found = None if below is None else self._anneal(below.order, level, warmths=WARMTHS[:1])
            if found is not None:
                self.archive.add(found)

    def _look_for_the_floor(self) -> None:
        """Lower and lower levels, by steps that shrink where they fail."""
        failures = 0
        while failures < NUM_FAILURES:
            lowest = self.archive.entries[0]
            room = lowest.peak_bytes - self._bounds.floor_bytes
            if room <= 0:
                return
            level = lowest.peak_bytes - max(1, room >> failures)
            start = self._best_start(lowest.order, level)
            found = self._anneal(start, level, warmths=FLOOR_WARMTHS, least_moves=FLOOR_MOVES)
            if found is None:
                failures += 1
            else:
                self.archive.add(found)

    def _best_start(self, order: Ints, level: int) -> Ints:
        """The order from which a short search gets furthest."""
        starts = [order, *self._cut_orders(level)]
        suggested = self._suggest(level)
        if suggested is not None:
            starts.append(self._steps.sequence(suggested))
        known = self.archive.best(level)
        if known is not None:
            starts.append(known.order)
        best: tuple[int, float, int] | None = None
        found = order
        for number, start in enumerate(starts):
            figures, better = self._steps.problem.anneal(
                start, budget_bytes=level, moves=self._moves() // SHORT, warmth=WARMTHS[0]
            )
            rank = (figures.excess_bytes, figures.seconds, number)
            if best is None or rank < best:
                best, found = rank, better
        return found

    def _cut_orders(self, level: int) -> list[Ints]:
        """Plans that keep at some moment what a cut there keeps, and all that the cut says nothing about."""
        plans: dict[frozenset[Rerun], None] = {}
        for moment in self._bounds.tightest(level, NUM_MOMENTS):
            for dropped in moment.dropped(level):
                plans[lazy_plan(self._steps.table, self._uses - dropped)] = None
        return [self._steps.sequence(plan) for plan in plans]

    def _anneal(
        self,
        order: Ints,
        level: int,
        *,
        warmths: Sequence[float] = WARMTHS,
        least_moves: int = 0,
        least_seconds: float = 0.0,
    ) -> Entry | None:
        """The best that annealing finds within `level`, None where it finds nothing."""
        found = [
            self._steps.problem.anneal(
                order,
                budget_bytes=level,
                moves=max(self._moves(), min(least_moves, MAX_WORK // self._size() ** 2)),
                warmth=warmth,
                seed=seed,
                least_seconds=least_seconds,
            )
            for seed, warmth in enumerate(warmths, start=1)
        ]
        figures, better = min(found, key=lambda item: (item[0].excess_bytes, item[0].seconds))
        if figures.excess_bytes:
            return None
        entry = self._entry(better)
        return entry if entry.peak_bytes <= level else None

    def _moves(self) -> int:
        return min(MOVES_PER_OP * self._size(), max(MIN_MOVES, MAX_WORK // self._size() ** 2))

    def _size(self) -> int:
        return len(self._steps.problem.seconds)

    def _record(self, order: Ints) -> None:
        self.archive.add(self._entry(order))

    def _entry(self, order: Ints) -> Entry:
        return Entry(self._steps.peak_bytes(order), self._steps.added_seconds(order), order)
