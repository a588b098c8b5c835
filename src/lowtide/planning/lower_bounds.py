"""Lower bounds for every budget, from minimum cuts at several time points of a step.

Each cut gives a bound that falls linearly with the budget: a tangent of the curve of best seconds (see
`cuts`). The largest bound counts. Time points and prices do not depend on the budget, except for a few more
prices at the time point with the largest bound: so a bound depends on the step and the budget alone.

Shortcomings: a bound knows one time point at a time, so it is loose where a plan must rematerialize a value
several times. A bound is valid for the step's own order of first runs.
"""

from collections.abc import Iterable
from functools import cached_property
from math import floor, inf

from lowtide.planning.cuts import Cut, TimePoint, time_point
from lowtide.planning.needs import needs_of
from lowtide.planning.search.table import Table
from lowtide.planning.simulate import baseline_runs, simulate

NUM_TIME_POINTS = 24
NUM_CUTS = 12
"""Prices for each time point; more hardly help."""
NUM_TIGHT = 8
"""More time points for the floor: those where most bytes are live in every schedule."""
EXTRA_CUTS = 12
"""More prices for one budget at most, at the time point with the largest bound."""


NUM_RICHER = 3
"""Cuts above the budget whose parts are tried in the bytes that a cut below it leaves free."""


class TangentCurve:
    """The bounds of one time point for every budget."""

    def __init__(self, at: TimePoint) -> None:
        self.at = at
        self._cuts: dict[float, Cut] = {}
        self.most, self.leanest = at.everything(), at.leanest()
        self.least_bytes = at.fixed_bytes + floor(self.leanest.value * (1 + 1e-12))

    @property
    def cuts(self) -> list[Cut]:
        """Cuts from low to high prices."""
        found = {cut.price: cut for cut in self._sides} | self._cuts
        return [found[price] for price in sorted(found)]

    def seconds(self, budget_bytes: int) -> float:
        """The bound of the known cuts for a budget."""
        if budget_bytes < self.least_bytes:
            return inf
        free_bytes = budget_bytes - self.at.fixed_bytes
        return max((cut.value - cut.price * free_bytes for cut in self._sides), default=0.0)

    def best_seconds(self, budget_bytes: int) -> float:
        """The bound of the best price for a budget."""
        if budget_bytes < self.least_bytes:
            return inf
        free_bytes = budget_bytes - self.at.fixed_bytes
        if free_bytes >= self.most.nbytes:
            return 0.0
        points = [self.most, *self._sides, self.leanest]
        above = min((p for p in points if p.nbytes > free_bytes), key=lambda p: (p.nbytes, p.seconds))
        below = [p for p in points if p.nbytes <= free_bytes]
        best = self.seconds(budget_bytes)
        if not below:
            return best
        under = max(below, key=lambda p: (p.nbytes, -p.seconds))
        for _ in range(EXTRA_CUTS):
            price = (under.seconds - above.seconds) / (above.nbytes - under.nbytes)
            if price <= 0:
                break
            cut = self._cut(price)
            best = max(best, cut.value - price * free_bytes)
            if cut.seconds + price * cut.nbytes >= (above.seconds + price * above.nbytes) * (1 - 1e-9):
                break
            if cut.nbytes > free_bytes:
                above = cut
            else:
                under = cut
        return max(best, 0.0)

    def dropped(self, budget_bytes: int) -> list[frozenset[int]]:
        """Storages that a cut for this budget drops: for the largest cut that fits, and the next larger
        one."""
        fitting, others = self._sides_of(budget_bytes)
        return [self._choice.difference(cut.kept) for cut in (*fitting[-1:], *others[:1])]

    def fullest(self, budget_bytes: int) -> Cut | None:
        """The largest cut that fits, with parts of larger ones in the bytes that it leaves free."""
        fitting, others = self._sides_of(budget_bytes)
        if not fitting:
            return None
        found = fitting[-1]
        for richer in others[:NUM_RICHER]:
            found = self.at.between(found, richer, budget_bytes - self.at.fixed_bytes)
        return found

    def not_kept(self, cut: Cut) -> frozenset[int]:
        """Storages that a cut could keep, and does not keep whole."""
        return self._choice.difference(cut.kept).union(cut.packed)

    @cached_property
    def _choice(self) -> frozenset[int]:
        return frozenset(int(s) for s in self.at.arc_storage if s >= 0)

    def _sides_of(self, budget_bytes: int) -> tuple[list[Cut], list[Cut]]:
        """Cuts that fit into a budget and cuts that do not, by their bytes."""
        free_bytes = budget_bytes - self.at.fixed_bytes
        self.best_seconds(budget_bytes)
        cuts = sorted([self.leanest, *self.cuts], key=lambda cut: (cut.nbytes, cut.seconds))
        return [cut for cut in cuts if cut.nbytes <= free_bytes], [
            cut for cut in cuts if cut.nbytes > free_bytes
        ]

    def _cut(self, price: float) -> Cut:
        if price not in self._cuts:
            self._cuts[price] = self.at.cut(price)
        return self._cuts[price]

    @cached_property
    def _sides(self) -> list[Cut]:
        """Cuts along the whole curve, each where the gap below two neighbours is largest. The floor needs
        none."""
        found: list[Cut] = []
        gaps = [(self.most, self.leanest)]
        while gaps and len(found) < NUM_CUTS:
            above, under = gaps.pop(0)
            if above.nbytes <= under.nbytes or under.seconds <= above.seconds:
                continue
            price = (under.seconds - above.seconds) / (above.nbytes - under.nbytes)
            cut = self._cut(price)
            found.append(cut)
            if cut.seconds + price * cut.nbytes < (above.seconds + price * above.nbytes) * (1 - 1e-6):
                gaps += [(above, cut), (cut, under)]
        return sorted(found, key=lambda cut: cut.price)


class Bounds:
    """Proven bounds of one step; all that serves every budget is computed once."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._needs = needs_of(table)
        self._known: dict[int, TangentCurve] = {}
        self._proven: dict[int, float] = {}

    def at(self, rank: int) -> TangentCurve:
        """The cuts at the first run of `rank`."""
        if rank not in self._known:
            self._known[rank] = TangentCurve(time_point(self._needs, rank))
        return self._known[rank]

    @cached_property
    def time_points(self) -> list[TangentCurve]:
        """One time point for each part of the step: the one with the most live bytes."""
        return [self.at(rank) for rank in self._ranks]

    @cached_property
    def _ranks(self) -> list[int]:
        plain = simulate(self.table.step, baseline_runs(self.table.step))
        live = {run.rank: int(nbytes) for run, nbytes in zip(plain.runs, plain.live_bytes, strict=True)}
        first, last = self._needs.span
        ranks = [rank for rank in range(first, last + 1) if rank not in self.table.on_demand]
        parts = min(NUM_TIME_POINTS, len(ranks))
        return [
            max(ranks[i * len(ranks) // parts : (i + 1) * len(ranks) // parts], key=lambda r: (live[r], -r))
            for i in range(parts)
        ]

    def remats_of_packed(self, packed: Iterable[int]) -> dict[int, int]:
        """By rank, the remats that unpack these storages."""
        numbers = [self._needs.packed_forms[storage].remat for storage in sorted(packed)]
        return {self.table.remats[number].rank: number for number in numbers}

    def tightest(self, budget_bytes: int, count: int) -> list[TangentCurve]:
        """The time points with the largest bounds for a budget."""
        reachable = [found for found in self.time_points if found.least_bytes <= budget_bytes]
        return sorted(reachable, key=lambda found: -found.seconds(budget_bytes))[:count]

    def seconds(self, budget_bytes: int) -> float:
        """No schedule within `budget_bytes` adds less; infinite where none is within it."""
        if budget_bytes < self.floor_bytes:
            return inf
        if not self.time_points:
            return 0.0
        if budget_bytes not in self._proven:
            best = max(self.time_points, key=lambda found: found.seconds(budget_bytes))
            self._proven[budget_bytes] = best.best_seconds(budget_bytes)
        return self._proven[budget_bytes]

    @cached_property
    def floor_ranks(self) -> list[int]:
        """The time points for the bound of the floor."""
        fixed = self._needs.fixed_bytes
        tight = sorted(range(self.table.size), key=lambda rank: (-fixed[rank], rank))[:NUM_TIGHT]
        return [*self._ranks, *(rank for rank in tight if rank not in self.table.on_demand)]

    @cached_property
    def floor_bytes(self) -> int:
        """No schedule has a lower peak."""
        return max([self.at(rank).least_bytes for rank in self.floor_ranks], default=self.table.static_bytes)
