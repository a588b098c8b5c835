"""Plans that keep, recompute and offload: for each budget the cheapest of all, stalls of the link counted.

Three searches, each with plans for all budgets, of which a budget takes the cheapest that fits:

1. without the store, as the planner does it for a step that has none;
2. with the store alone: values are offloaded until the step fits (`planning/swap_sets.py`);
3. mixed: starting from plans of the first search, from those of a search in which a value comes back from
   the store for the seconds of its transfers, and from those of `mu-two`, more values are offloaded until
   the step fits.

Every plan of the last two has its transfers placed for a level of bytes (`planning/placing.py`) and is judged
by the simulator, with the link. Since each search serves larger budgets by what it has for smaller ones, a
larger budget is never slower.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lowtide.facts import Action, Node, Remat, Run, Step
from lowtide.planning.mu_two import policy_with_swap
from lowtide.planning.offload.offload_sets import Swaps
from lowtide.planning.offload.transfer_model import swapped_bytes
from lowtide.planning.offload.transfer_schedule import placed
from lowtide.planning.planner import Planner
from lowtide.planning.schedules import without_needless_runs
from lowtide.planning.search.archive import Archive
from lowtide.planning.search.problem import Ints
from lowtide.planning.search.table import RematSet, schedule_of
from lowtide.planning.simulate import Timeline, simulate

NUM_LEVELS = 24
"""Budgets for which transfers are placed, from the plain peak to the lowest."""

NUM_MU_TWO = 6
"""Budgets for which `mu-two` gives a plan to start from."""
SLACK = 1.5
"""How much longer transfers may take than they were measured, where there is room for that."""


@dataclass(frozen=True, slots=True, eq=False)
class Offloading:
    """A plan with its transfers placed; of equally fast ones that which writes less is better."""

    peak_bytes: int
    seconds: float
    store_bytes: int
    runs: tuple[Run, ...]

    @property
    def price(self) -> tuple[float, int]:
        return self.seconds, self.store_bytes


def can_offload(step: Step) -> bool:
    return step.transfer_speed is not None and any(node.movable for node in step.nodes)


class OffloadPlanner(Planner):
    """Plans for one step whose values can be offloaded."""

    @cached_property
    def without(self) -> Planner:
        """Plans that offload nothing."""
        return Planner(_with_remats(self.step, _kept_or_recomputed))

    @cached_property
    def _priced(self) -> Planner:
        """Plans in which a value comes back from the store for the seconds of its transfers."""
        return Planner(_with_remats(self.step, lambda node: _priced(self.step, node)))

    @cached_property
    def _swaps(self) -> Swaps:
        return Swaps(self.problem)

    @cached_property
    def alone(self) -> Archive[Offloading]:
        """Plans that recompute nothing."""
        return self._search([self.problem.sequence(())])

    @cached_property
    def mixed(self) -> Archive[Offloading]:
        others = [self.without.problem.runs(entry.order) for entry in self.without.auto.archive.entries]
        seeds = [self.problem.sequence_of(runs) for runs in others]
        priced = [entry.order for entry in self._priced.auto.archive.entries]
        low, high = self.without.floor_bytes, self.plain.peak_bytes
        levels = {high - (high - low) * i // NUM_MU_TWO for i in range(1, NUM_MU_TWO + 1)}
        return self._search([*seeds, *priced, *(self._mu_two(level) for level in sorted(levels))])

    def best(self, budget_bytes: int) -> Timeline | None:
        """The cheapest way to run the step in that many bytes."""
        found = [archive.best(budget_bytes) for archive in (self.alone, self.mixed)]
        plan = min((entry for entry in found if entry is not None), key=lambda e: e.price, default=None)
        other = self.without.best(budget_bytes)
        if plan is None or (other is not None and other.added_seconds <= plan.seconds):
            return None if other is None else simulate(self.step, other.runs)
        return self._with_slack(plan, budget_bytes)

    def _with_slack(self, plan: Offloading, budget_bytes: int) -> Timeline:
        """The plan with its transfers further apart from their uses, where that costs nothing."""
        timeline = simulate(self.step, plan.runs)
        careful = placed(self.step, plan.runs, budget_bytes=budget_bytes, slack=SLACK)
        # not where it is faster, either: then a larger budget could be slower
        is_same = careful.added_seconds == timeline.added_seconds
        return careful if is_same and careful.peak_bytes <= budget_bytes else timeline

    def lowest(self) -> Timeline:
        timeline = self.best(self.floor_bytes)
        assert timeline is not None
        return timeline

    @property
    def floor_bytes(self) -> int:
        lowest = [archive.entries[0].peak_bytes for archive in (self.alone, self.mixed)]
        return min(self.without.floor_bytes, *lowest)

    def timeline(self, plan: RematSet, *, budget_bytes: int = 0) -> Timeline:
        return self._placed(schedule_of(self.table, plan), budget_bytes)

    def repaired(self, runs: Sequence[Run], *, budget_bytes: int) -> Timeline | None:
        """As any planner does, but transfers are placed anew: where they hide depends on the sizes."""
        order = self.problem.repaired(runs, budget_bytes=budget_bytes)
        return None if order is None else self._placed(self.problem.runs(order), budget_bytes)

    def by_another(self, planner: str, budget_bytes: int) -> Timeline | None:
        if planner != "mu-two":
            return super().by_another(planner, budget_bytes)
        return self._placed(self.problem.runs(self._mu_two(budget_bytes)), budget_bytes)

    def _mu_two(self, budget_bytes: int) -> Ints:
        assert self.step.transfer_speed is not None
        return policy_with_swap(
            self.problem, self._swaps, self.step.transfer_speed, budget_bytes=budget_bytes
        )

    def _placed(self, runs: Sequence[Run], budget_bytes: int) -> Timeline:
        return placed(self.step, without_needless_runs(self.step, runs), budget_bytes=budget_bytes)

    def _search(self, seeds: Iterable[Ints]) -> Archive[Offloading]:
        """Offload values of each seed until it fits, for every level from the plain peak to the lowest."""
        cheapest = sorted(seeds, key=self.problem.added_seconds)
        rows = [list(self._swaps.rows(seed)) for seed in cheapest]
        low = min(peak_bytes for row in rows for peak_bytes, _ in row)
        high = max(low, self.plain.peak_bytes)
        levels = sorted(
            {high - (high - low) * i // (NUM_LEVELS - 1) for i in range(NUM_LEVELS)}, reverse=True
        )
        found: Archive[Offloading] = Archive()
        for seed, row in zip(cheapest, rows, strict=True):
            least_seconds = self.problem.added_seconds(seed)
            for level in levels:
                fits = next((order for peak_bytes, order in row if peak_bytes <= level), None)
                known = found.best(level)
                if fits is None or (known and known.seconds <= least_seconds):
                    continue
                found.add(self._offloading(self._placed(self.problem.runs(fits), level)))
        return found

    @staticmethod
    def _offloading(timeline: Timeline) -> Offloading:
        assert timeline.traffic is not None
        return Offloading(
            timeline.peak_bytes, timeline.added_seconds, timeline.traffic.store_bytes, timeline.runs
        )


def _with_remats(step: Step, remats: Callable[[Node], tuple[Remat, ...]]) -> Step:
    """The same step with other remats and without a link."""
    return replace(
        step, transfer_speed=None, nodes=tuple(replace(node, remats=remats(node)) for node in step.nodes)
    )


def _kept_or_recomputed(node: Node) -> tuple[Remat, ...]:
    return tuple(remat for remat in node.remats if remat.action is not Action.OFFLOAD)


def _priced(step: Step, node: Node) -> tuple[Remat, ...]:
    link = step.transfer_speed
    assert link is not None
    found = []
    for remat in node.remats:
        seconds = remat.seconds
        if remat.action is Action.OFFLOAD:
            nbytes = swapped_bytes(step, node.rank)
            seconds += link.write_seconds(nbytes) + link.read_seconds(nbytes)
        found.append(replace(remat, seconds=seconds))
    return tuple(found)
