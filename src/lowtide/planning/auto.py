"""The default planner: one search along the border between bytes and seconds, for all budgets at once.

Every plan that is worth having goes into an archive, from which a budget takes the cheapest that fits; the
plans of the other planners are there too, so that it is never worse than any of them. All limits are
counts of moves, never of time, and the random numbers are seeded, so that the same step always gives the
same archive.

0. Where a step has many equal blocks, one with a few of them is solved first (`representative`), and its
   plans are spread over all. At a level where that is near the bound, the search that follows is as long as
   for the few blocks, however many there are.
1. Levels of bytes fall from the plain peak to the proven floor. At each, annealing starts from the best of
   the plan of the level before, the plans of others, and the cuts that prove the level's bound: those say
   what to keep at one moment, as it is or as less, which is nearly all that matters at most levels.
2. Below the last level that was reached, the steps shrink until they fail.
3. Back up the levels, each from the plan below it; then on at the levels that are furthest from their bounds.
4. Between two plans of the archive, a few rungs are worked out when a budget first asks for them. Their
   seconds stay between those of the two, and each rung starts from the one below: so a larger budget is
   never slower, whichever budgets are asked for and in whatever order.
"""

from dataclasses import replace
from math import inf

from lowtide.garbage import rarely_collected
from lowtide.planning import mu_two
from lowtide.planning.baselines import every_block, retain_all, retain_none, square_root
from lowtide.planning.planning_problem import PlanningProblem
from lowtide.planning.repeated_blocks import Point, Spread, representative
from lowtide.planning.search.archive import Archive, ArchiveEntry
from lowtide.planning.search.dropped_storages import retain_only
from lowtide.planning.search.problem import Figures, Ints
from lowtide.planning.search.table import RematSet
from lowtide.planning.simulate import Timeline

SEEDS = (retain_all, retain_none, every_block, square_root)
"""Planners from whose answers the search starts, `mu-two` besides; never one that a package registers."""
NUM_LEVELS = 16
NUM_RUNGS = 12
MOVES_PER_OP = 120
"""Moves of annealing for each op of a small step, at each level."""
MANY_MOVES = 3000
"""Larger steps get these and `FEW_PER_OP` for each op: there, cuts are good starts."""
FEW_PER_OP = 1
COLD, WARM, HOT = 0.05, 0.5, 3.0
"""How warm annealing starts: coldly it keeps what is good in its start, warmly it leaves it."""
SOLVED = 1.15
"""How far above its proven bound a plan of few blocks may be, spread over all, to need little more search."""
ENOUGH = 0.002
"""How far above its proven bound a plan may be for the search to end."""
SHORT = 8
"""Starts are compared by what this part of the moves makes of them."""
NUM_MOMENTS = 2
"""Moments whose cuts are tried at each level."""
RUNG_WARMTHS = (WARM, HOT)
"""How warm the searches between two plans start from below; one more starts coldly from above."""
RUNGS_PER_SEARCH = 2
"""Only every so manieth rung is searched for, the others are cuts alone."""
FLOOR_WARMTHS = (WARM, HOT, HOT, HOT)
"""How warm the search for the floor starts, where only plans far from all others may fit."""
FLOOR_TIMES, FLOOR_MOVES = 2, 10_000
"""Moves of each of these searches, against those at every level; and how many they are at least."""
NUM_FAILURES = 4
"""Levels below the lowest plan that may fail before the floor is believed."""
NUM_REFINEMENTS = 24
"""Searches where most may still be won, when all levels have a plan, and the moves of each."""
REFINE_MOVES = 4000


class Auto:
    """The schedules of one step for all budgets, without offload."""

    @rarely_collected()
    def __init__(self, problem: PlanningProblem) -> None:
        self._problem, self._steps, self._bounds = problem, problem.search_problem, problem.bounds
        self._spread = spread_of(problem)
        self._uses = frozenset(problem.table.uses)
        self._timelines: dict[int, tuple[ArchiveEntry, Timeline]] = {}
        self._rungs: dict[int, list[ArchiveEntry]] = {}
        self.archive: Archive[ArchiveEntry] = Archive()
        self._found = self.archive
        for remats in (*(seed(problem, 0) for seed in SEEDS), mu_two.lowest(problem)):
            order = self._steps.sequence(remats)
            self.archive.add(self._entry(self._steps.problem.evaluate(order, 0), order))
        for point in self._spread.points if self._spread is not None else ():
            self.archive.add(self._entry(point.figures, point.order))
        if self._steps.remats:
            levels = self._levels()
            self._walk_down(levels)
            self._look_for_the_floor()
            levels.append(self.archive.entries[0].peak_bytes)
            self._walk_up(levels)
            self._refine([level for level in levels if not self._is_solved(level)])
            self._keep_the_best_of(levels)
        self._checked(self.archive, self.archive.entries[0].peak_bytes)

    @property
    def floor_bytes(self) -> int:
        """The lowest peak that was found."""
        return self.archive.entries[0].peak_bytes

    def best_timeline(self, budget_bytes: int) -> Timeline | None:
        """The cheapest schedule within `budget_bytes`; that of `mu-two` where it is cheaper for once."""
        entry = self.best(budget_bytes)
        if entry is None:
            return None
        prefixes = self._problem.once(mu_two.policy)
        other = next((prefix for prefix in prefixes if prefix.peak_bytes <= budget_bytes), None)
        if other is not None and other.recompute_seconds < entry.seconds:
            remats = mu_two.first_within(self._problem, budget_bytes)
            assert remats is not None
            return self._problem.timeline(remats)
        return self.timeline(entry)

    def timeline(self, entry: ArchiveEntry) -> Timeline:
        """What the simulator says of a plan."""
        if id(entry) not in self._timelines:
            self._timelines[id(entry)] = entry, self._steps.timeline(entry.order)
        return self._timelines[id(entry)][1]

    def best(self, budget_bytes: int) -> ArchiveEntry | None:
        """The cheapest plan whose peak is at most `budget_bytes`.

        Of two kinds, each of which is never dearer for a larger budget: all that was found for the levels,
        and rungs between the best of those.
        """
        found = self._checked(self._found, budget_bytes)
        rung = self._last_rung(budget_bytes)
        return rung if rung is not None and (found is None or rung.seconds < found.seconds) else found

    def _checked(self, archive: Archive[ArchiveEntry], budget_bytes: int) -> ArchiveEntry | None:
        """The best plan of an archive, once the simulator agrees about its bytes."""
        while (entry := archive.best(budget_bytes)) is not None:
            peak_bytes = self.timeline(entry).peak_bytes
            if peak_bytes == entry.peak_bytes:
                break
            archive.replace(entry, replace(entry, peak_bytes=peak_bytes))
        return entry

    def _last_rung(self, budget_bytes: int) -> ArchiveEntry | None:
        entry = self._checked(self.archive, budget_bytes)
        above = self.archive.above(budget_bytes)
        if entry is None or above is None:
            return entry
        if entry.peak_bytes not in self._rungs:
            self._rungs[entry.peak_bytes] = [entry]
        rungs = self._rungs[entry.peak_bytes]
        gap = above.peak_bytes - entry.peak_bytes
        levels = [entry.peak_bytes + gap * i // NUM_RUNGS for i in range(NUM_RUNGS)]
        while len(rungs) < NUM_RUNGS and levels[len(rungs)] <= budget_bytes:
            search = len(rungs) % RUNGS_PER_SEARCH == 0
            rungs.append(self._rung(rungs[-1], above, levels[len(rungs)], search=search))
        return [rung for rung, level in zip(rungs, levels, strict=False) if level <= budget_bytes][-1]

    def _rung(self, last: ArchiveEntry, above: ArchiveEntry, level: int, *, search: bool) -> ArchiveEntry:
        """A plan within `level`, dearer than `above` and cheaper than `last`; else that one."""
        known = self._found.best(level)
        best = last if known is None or known.seconds >= last.seconds else known
        mixed = self._mixed(level)
        orders = [*self._full_orders(level), *([] if mixed is None else [mixed.order])]
        tried = [(self._steps.problem.evaluate(order, level), order) for order in orders]
        best = self._cheapest(best, tried, least_seconds=above.seconds)
        if search:
            starts = [*((best, warmth) for warmth in RUNG_WARMTHS), (above, COLD)]
            tried = [
                self._anneal(start.order, level, warmth=warmth, seed=seed, least_seconds=above.seconds)
                for seed, (start, warmth) in enumerate(starts, start=1)
            ]
            best = self._cheapest(best, tried, least_seconds=above.seconds)
        return best if self.timeline(best).peak_bytes <= level else last

    def _cheapest(
        self, best: ArchiveEntry, tried: list[tuple[Figures, Ints]], *, least_seconds: float
    ) -> ArchiveEntry:
        """The cheapest of `best` and of those that fit and add at least `least_seconds`."""
        fit = [self._entry(figures, order) for figures, order in tried if not figures.excess_bytes]
        return min([best, *(e for e in fit if e.seconds >= least_seconds)], key=lambda e: e.seconds)

    def _levels(self) -> list[int]:
        """Budgets below the plain peak, from high to low."""
        low, high = self._bounds.floor_bytes, self.archive.entries[-1].peak_bytes
        levels = {high - (high - low) * i // NUM_LEVELS for i in range(1, NUM_LEVELS + 1)}
        return sorted(levels, reverse=True)

    def _walk_down(self, levels: list[int]) -> None:
        order = self.archive.entries[-1].order
        for level in levels:
            figures, found = self._anneal(self._best_start(order, level), level)
            if not figures.excess_bytes:
                self.archive.add(self._entry(figures, found))
                order = found

    def _look_for_the_floor(self) -> None:
        """Lower and lower levels, by steps that shrink where they fail."""
        failures = 0
        while failures < NUM_FAILURES:
            lowest = self.archive.entries[0]
            room = lowest.peak_bytes - self._bounds.floor_bytes
            if room <= 0:
                return
            level = lowest.peak_bytes - max(1, room >> failures)
            if not self._lower(lowest, level):
                failures += 1

    def _lower(self, lowest: ArchiveEntry, level: int) -> bool:
        """Whether some search finds a plan within `level`; the archive gets all that is lower than `lowest`.

        Some searches keep nothing as less: among fewer ways they find what the others miss.
        """
        moves = max(FLOOR_MOVES, FLOOR_TIMES * self._moves(level))
        start = self._best_start(lowest.order, level)
        searches = [(self._steps.problem, start, warmth) for warmth in FLOOR_WARMTHS]
        fewer = self._steps.without_kept
        if fewer is not None:
            searches[1:1] = [(fewer, order, HOT) for order in self._cut_orders(level)[:2]]
        for seed, (problem, order, warmth) in enumerate(searches, start=1):
            figures, found = problem.anneal(
                order, budget_bytes=level, moves=moves, warmth=warmth, seed=seed, enough_seconds=inf
            )
            if figures.peak_bytes < lowest.peak_bytes:
                self.archive.add(self._entry(figures, found))
            if not figures.excess_bytes:
                return True
        return False

    def _walk_up(self, levels: list[int]) -> None:
        """Search from the plan of the level below, whose slack leads where no plan of this level does."""
        below = self.archive.entries[0]
        for warmth in (WARM, HOT):
            self._improve(
                below.peak_bytes, below, warmth=warmth, moves=FLOOR_TIMES * self._moves(below.peak_bytes)
            )
        for level in sorted(levels):
            self._improve(level, below, warmth=WARM)
            below = self.archive.best(level) or below

    def _refine(self, levels: list[int]) -> None:
        """Search on where most of a plan's seconds may still be won, the less the oftener it was tried."""
        tries = dict.fromkeys(levels, 0)
        moves = min(REFINE_MOVES, _moves(len(self._steps.problem.seconds)))
        for _ in range(NUM_REFINEMENTS):
            known = {
                level: entry for level in levels if (entry := self.archive.best(level)) and entry.seconds > 0
            }
            gaps = {
                level: (1 - self._bounds.seconds(level) / entry.seconds) / (1 + tries[level])
                for level, entry in known.items()
            }
            level = max(gaps, key=lambda level: (gaps[level], level), default=0)
            if gaps.get(level, 0.0) <= 0:
                return
            below = max((lower for lower in known if lower < level), default=level)
            start, warmth = ((below, WARM), (level, HOT))[tries[level] % 2]
            tries[level] += 1
            self._improve(level, known[start], warmth=warmth, seed=1 + tries[level], moves=moves)

    def _keep_the_best_of(self, levels: list[int]) -> None:
        """Let rungs stand between the best plans of the levels alone: others would stand in their way, since
        no rung is cheaper than the plan above it."""
        best = (self._found.best(level) for level in levels)
        self.archive = Archive()
        for entry in (self._found.entries[-1], *best):
            if entry is not None:
                self.archive.add(entry)

    def _improve(
        self, level: int, start: ArchiveEntry, *, warmth: float, seed: int = 1, moves: int | None = None
    ) -> None:
        """Let the archive have what a search for `level` finds, if it is better than what it has."""
        known = self.archive.best(level)
        figures, order = self._anneal(start.order, level, warmth=warmth, seed=seed, moves=moves)
        if not figures.excess_bytes and (known is None or figures.seconds < known.seconds):
            self.archive.add(self._entry(figures, order))

    def _best_start(self, order: Ints, level: int) -> Ints:
        """The order from which a short search gets furthest."""
        starts = [order]
        known = self.archive.best(level)
        if known is not None:
            starts.append(known.order)
        mixed = self._mixed(level)
        if mixed is not None:
            starts.append(mixed.order)
        if not self._is_solved(level):
            starts += self._cut_orders(level)
            suggested = mu_two.first_within(self._problem, level)
            if suggested is not None:
                starts.append(self._steps.sequence(suggested))
        tried = [
            self._steps.problem.anneal(
                start, budget_bytes=level, moves=self._moves(level) // SHORT, warmth=COLD
            )
            for start in {start.tobytes(): start for start in starts}.values()
        ]
        return min(tried, key=lambda found: (found[0].excess_bytes, found[0].seconds))[1]

    def _mixed(self, level: int) -> Point | None:
        """A plan that is mixed from those of the shorter step."""
        return None if self._spread is None else self._spread.mixed(level)

    def _is_solved(self, level: int) -> bool:
        """Whether what was found for the shorter step is good for a level of the whole one, too."""
        mixed = self._mixed(level)
        return mixed is not None and mixed.seconds <= SOLVED * self._bounds.seconds(level)

    def _cut_orders(self, level: int) -> list[Ints]:
        """Plans that keep at some moment what a cut there keeps, and all that the cut says nothing about."""
        table = self._steps.table
        plans: dict[RematSet, None] = {}
        for moment in self._bounds.tightest(level, NUM_MOMENTS):
            for dropped in moment.dropped(level):
                plans[retain_only(table, self._uses - dropped)] = None
        return [*(self._steps.sequence(plan) for plan in plans), *self._full_orders(level)]

    def _full_orders(self, level: int) -> list[Ints]:
        """A plan that keeps at the tightest moment what fits there, some of it as less: where no other
        moment matters it is nearly the best."""
        for moment in self._bounds.tightest(level, 1):
            cut = moment.fullest(level)
            if cut is not None:
                kept = self._uses - moment.not_kept(cut)
                plan = retain_only(self._steps.table, kept, self._bounds.remats_of_packed(cut.packed))
                return [self._steps.sequence(plan)]
        return []

    def _anneal(
        self,
        order: Ints,
        level: int,
        *,
        warmth: float = COLD,
        seed: int = 1,
        moves: int | None = None,
        least_seconds: float = 0.0,
        enough_seconds: float = 0.0,
    ) -> tuple[Figures, Ints]:
        """The best that annealing finds for `level`, by the figures of the compiled search."""
        proven = self._bounds.seconds(level) * (1 + ENOUGH)
        return self._steps.problem.anneal(
            order,
            budget_bytes=level,
            moves=self._moves(level) if moves is None else moves,
            warmth=warmth,
            seed=seed,
            least_seconds=least_seconds,
            enough_seconds=max(least_seconds, enough_seconds, proven),
        )

    def _moves(self, level: int) -> int:
        """By the ops that there are to search for: copies of a solved block are not."""
        if self._spread is not None and self._is_solved(level):
            return _moves(self._spread.num_ops)
        return _moves(len(self._steps.problem.seconds))

    def _entry(self, figures: Figures, order: Ints) -> ArchiveEntry:
        return ArchiveEntry(figures.peak_bytes, self._steps.added_seconds(order), order)


def _moves(num_ops: int) -> int:
    return min(MOVES_PER_OP * num_ops, MANY_MOVES + FEW_PER_OP * num_ops)


def spread_of(problem: PlanningProblem) -> Spread | None:
    """The schedules of a step with fewer of the equal blocks, where this one has many."""
    found = representative(problem.step)
    if found is None:
        return None
    short = PlanningProblem(found.step)
    orders = [entry.order for entry in short.once(Auto).archive.entries]
    return Spread(found, short.search_problem, problem.search_problem, orders)
