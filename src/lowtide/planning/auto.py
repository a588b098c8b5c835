"""The search of `auto` in one form of a step: the Pareto front of bytes and seconds, for all budgets at once.

An archive collects the schedules of the Pareto front. A budget takes the cheapest schedule that fits. The
archive has the answers of the other built-in planners, so `auto` is never worse than any of them. All limits
are counts of moves, never of time, and random numbers are seeded: the same step gives the same archive.

0. For a step with many equal blocks, a shorter step with few of them is solved first (`repeated_blocks`). Its
   schedules are spread over all blocks. At a memory level where a spread schedule is near the bound, the
   search is as short as for the few blocks.
1. Memory levels fall from the baseline's peak to the proven floor. At each memory level, annealing starts
   from the best of: the schedule of the memory level before, the seeds, and the cuts that prove the bound. A
   cut says what to retain at one time point, whole or packed; this choice dominates the cost at most levels.
2. Below the lowest memory level reached, the distances shrink until the search fails.
3. The search goes up the memory levels, each from the schedule below; then on where the gap to the bound is
   largest.
4. Between two schedules of the archive, a few budget steps are computed when a budget first asks for them.
   Their seconds stay between those of the two schedules, and each starts from the one below. So a larger
   budget is never slower, in whatever order budgets are asked for.
"""

from dataclasses import replace
from math import inf

from lowtide.garbage import rarely_collected
from lowtide.planning import mu_two
from lowtide.planning.baselines import every_block, retain_all, retain_none, square_root
from lowtide.planning.planning_problem import PlanningProblem
from lowtide.planning.repeated_blocks import Point, Spread, representative
from lowtide.planning.search.dropped_storages import retain_only
from lowtide.planning.search.problem import Figures, Ints
from lowtide.planning.search.step_problem import Archive, ArchiveEntry
from lowtide.planning.search.table import RematSet
from lowtide.planning.simulate import Timeline

SEEDS = (retain_all, retain_none, every_block, square_root)
"""Planners from whose answers the search starts, `mu-two` besides; never one that a package registers."""
NUM_LEVELS = 16
NUM_BUDGET_STEPS = 12
MOVES_PER_OP = 120
"""Annealing moves for each op of a small step, at each memory level."""
MANY_MOVES = 3000
"""Annealing moves of a larger step, and `FEW_PER_OP` for each op: there, cuts are good starts."""
FEW_PER_OP = 1
COLD, WARM, HOT = 0.05, 0.5, 3.0
"""The start temperature of annealing: a cold search stays near its start, a warm one leaves it."""
SOLVED = 1.15
"""A schedule of few blocks, spread over all, that is within this factor of its bound needs little search."""
ENOUGH = 0.002
"""The search of a memory level ends at a schedule that is above its proven bound by this share."""
SHORT = 8
"""Starts are compared after this part of the moves."""
NUM_TIME_POINTS = 2
"""Time points whose cuts are tried at each memory level."""
BUDGET_STEP_WARMTHS = (WARM, HOT)
"""Start temperatures of the searches from the schedule below; one more starts cold from the one above."""
BUDGET_STEPS_PER_SEARCH = 2
"""One of this many budget steps is searched; the others are cuts alone."""
FLOOR_WARMTHS = (WARM, HOT, HOT, HOT)
"""Start temperatures of the search for the floor, where only schedules far from all others may fit."""
FLOOR_TIMES, FLOOR_MOVES = 2, 10_000
"""Moves of each of these searches: a multiple of those at a memory level, and a minimum."""
NUM_FAILURES = 4
"""Memory levels below the lowest schedule that may fail before the search for the floor ends."""
NUM_REFINEMENTS = 24
"""Searches at the memory levels with the largest gaps, and the moves of each."""
REFINE_MOVES = 4000


class Auto:
    """The schedules of one step for all budgets, without offload."""

    @rarely_collected()
    def __init__(self, problem: PlanningProblem) -> None:
        self._problem, self._steps, self._bounds = problem, problem.search_problem, problem.bounds
        self._spread = spread_of(problem)
        self._uses = frozenset(problem.table.uses)
        self._timelines: dict[int, tuple[ArchiveEntry, Timeline]] = {}
        self._budget_steps: dict[int, list[ArchiveEntry]] = {}
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
        while self._checked(self.archive, self.floor_bytes) is None:
            pass  # the simulator corrected the first entry, and another one has the lowest peak now

    @property
    def floor_bytes(self) -> int:
        """The lowest peak that was found."""
        return self.archive.entries[0].peak_bytes

    def best_timeline(self, budget_bytes: int) -> Timeline | None:
        """The cheapest schedule within `budget_bytes`; that of `mu-two` where it is cheaper."""
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
        """An entry, simulated."""
        if id(entry) not in self._timelines:
            self._timelines[id(entry)] = entry, self._steps.timeline(entry.order)
        return self._timelines[id(entry)][1]

    def best(self, budget_bytes: int) -> ArchiveEntry | None:
        """The cheapest entry within `budget_bytes`: of a memory level, or of a budget step between two.

        Neither kind is slower for a larger budget.
        """
        found = self._checked(self._found, budget_bytes)
        between = self._last_budget_step(budget_bytes)
        return (
            between if between is not None and (found is None or between.seconds < found.seconds) else found
        )

    def _checked(self, archive: Archive[ArchiveEntry], budget_bytes: int) -> ArchiveEntry | None:
        """The best entry of an archive, once the simulator agrees about its bytes."""
        while (entry := archive.best(budget_bytes)) is not None:
            peak_bytes = self.timeline(entry).peak_bytes
            if peak_bytes == entry.peak_bytes:
                break
            archive.replace(entry, replace(entry, peak_bytes=peak_bytes))
        return entry

    def _last_budget_step(self, budget_bytes: int) -> ArchiveEntry | None:
        entry = self._checked(self.archive, budget_bytes)
        above = self.archive.above(budget_bytes)
        if entry is None or above is None:
            return entry
        if entry.peak_bytes not in self._budget_steps:
            self._budget_steps[entry.peak_bytes] = [entry]
        steps = self._budget_steps[entry.peak_bytes]
        gap = above.peak_bytes - entry.peak_bytes
        levels = [entry.peak_bytes + gap * i // NUM_BUDGET_STEPS for i in range(NUM_BUDGET_STEPS)]
        while len(steps) < NUM_BUDGET_STEPS and levels[len(steps)] <= budget_bytes:
            search = len(steps) % BUDGET_STEPS_PER_SEARCH == 0
            steps.append(self._budget_step(steps[-1], above, levels[len(steps)], search=search))
        return [between for between, level in zip(steps, levels, strict=False) if level <= budget_bytes][-1]

    def _budget_step(
        self, last: ArchiveEntry, above: ArchiveEntry, level: int, *, search: bool
    ) -> ArchiveEntry:
        """An entry within `level` that costs more than `above` and less than `last`; else `last`."""
        known = self._found.best(level)
        best = last if known is None or known.seconds >= last.seconds else known
        mixed = self._mixed(level)
        orders = [*self._full_orders(level), *([] if mixed is None else [mixed.order])]
        tried = [(self._steps.problem.evaluate(order, level), order) for order in orders]
        best = self._cheapest(best, tried, least_seconds=above.seconds)
        if search:
            starts = [*((best, warmth) for warmth in BUDGET_STEP_WARMTHS), (above, COLD)]
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
        """Memory levels below the peak of the baseline, from high to low."""
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
        """Try lower and lower memory levels; the distance shrinks after each failure."""
        failures = 0
        while failures < NUM_FAILURES:
            lowest = self.archive.entries[0]
            slack_bytes = lowest.peak_bytes - self._bounds.floor_bytes
            if slack_bytes <= 0:
                return
            level = lowest.peak_bytes - max(1, slack_bytes >> failures)
            if not self._lower(lowest, level):
                failures += 1

    def _lower(self, lowest: ArchiveEntry, level: int) -> bool:
        """Whether a search finds a schedule within `level`; the archive gets every schedule below `lowest`.

        Some searches pack nothing: a search among fewer remats can find what the others miss.
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
        """Search each memory level from the schedule of the one below, far from the schedules here."""
        below = self.archive.entries[0]
        for warmth in (WARM, HOT):
            self._improve(
                below.peak_bytes, below, warmth=warmth, moves=FLOOR_TIMES * self._moves(below.peak_bytes)
            )
        for level in sorted(levels):
            self._improve(level, below, warmth=WARM)
            below = self.archive.best(level) or below

    def _refine(self, levels: list[int]) -> None:
        """Search on at the memory level with the largest gap, divided by the number of earlier attempts."""
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
        """Keep the best entry of each memory level: no budget step is cheaper than the entry above it, so
        other entries would only limit budget steps."""
        best = (self._found.best(level) for level in levels)
        self.archive = Archive()
        for entry in (self._found.entries[-1], *best):
            if entry is not None:
                self.archive.add(entry)

    def _improve(
        self, level: int, start: ArchiveEntry, *, warmth: float, seed: int = 1, moves: int | None = None
    ) -> None:
        """Add the result of a search for `level` to the archive, where it is better."""
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
        """A mixture of schedules of the shorter step."""
        return None if self._spread is None else self._spread.mixed(level)

    def _is_solved(self, level: int) -> bool:
        """Whether a mixture of schedules of the shorter step is near the bound of a memory level."""
        mixed = self._mixed(level)
        return mixed is not None and mixed.seconds <= SOLVED * self._bounds.seconds(level)

    def _cut_orders(self, level: int) -> list[Ints]:
        """Sequences that retain what a cut keeps live at its time point, and storages outside of the cut."""
        table = self._steps.table
        plans: dict[RematSet, None] = {}
        for point in self._bounds.tightest(level, NUM_TIME_POINTS):
            for dropped in point.dropped(level):
                plans[retain_only(table, self._uses - dropped)] = None
        return [*(self._steps.sequence(plan) for plan in plans), *self._full_orders(level)]

    def _full_orders(self, level: int) -> list[Ints]:
        """A sequence that retains at the tightest time point as much as fits, partly packed. It is nearly the
        best where no other time point matters."""
        for point in self._bounds.tightest(level, 1):
            cut = point.fullest(level)
            if cut is not None:
                kept = self._uses - point.not_kept(cut)
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
        """The best sequence that annealing finds for `level`, by the figures of the compiled search."""
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
        """Annealing moves by the number of ops; copies of a solved block do not count."""
        if self._spread is not None and self._is_solved(level):
            return _moves(self._spread.num_ops)
        return _moves(len(self._steps.problem.seconds))

    def _entry(self, figures: Figures, order: Ints) -> ArchiveEntry:
        return ArchiveEntry(figures.peak_bytes, self._steps.added_seconds(order), order)


def _moves(num_ops: int) -> int:
    return min(MOVES_PER_OP * num_ops, MANY_MOVES + FEW_PER_OP * num_ops)


def spread_of(problem: PlanningProblem) -> Spread | None:
    """The schedules of a shorter step with few of the equal blocks; None for a step without many."""
    found = representative(problem.step)
    if found is None:
        return None
    short = PlanningProblem(found.step)
    orders = [entry.order for entry in short.once(Auto).archive.entries]
    return Spread(found, short.search_problem, problem.search_problem, orders)
