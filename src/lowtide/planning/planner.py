"""Planners: from a step and a budget in bytes to a schedule that fits, at little recompute time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from lowtide.errors import BudgetTooSmall, LowtideError
from lowtide.facts import UPDATE, Activation, Graph, GraphRun, Offload, Reserve, Run, Schedule, Solution, Step
from lowtide.facts.plan import PLANNERS
from lowtide.garbage import rarely_collected
from lowtide.planning import baselines, mu_two
from lowtide.planning.activations import activations
from lowtide.planning.auto import Auto
from lowtide.planning.bounds.lower_bounds import Bounds
from lowtide.planning.decisions import decide, floor_hint
from lowtide.planning.representative import Spread, representative
from lowtide.planning.schedules import (
    eager_timeline,
    graph_schedules,
    optimizer_step,
    reserve,
    runs_of_schedules,
    without_needless_runs,
)
from lowtide.planning.search.archive import ArchiveEntry
from lowtide.planning.search.step_problem import StepProblem
from lowtide.planning.search.table import RematSet, Table, make_table, schedule_of
from lowtide.planning.simulate import Timeline, plain_runs, simulate
from lowtide.units import size_and_bytes

MAY_BE_EAGER = ("auto", "mu-two", "none")
"""Planners that recompute nothing where nothing needs to be."""

BASELINES: dict[str, Callable[[Table], RematSet]] = {
    "none": lambda table: frozenset(),
    "all": baselines.retain_none,
    "every-block": baselines.every_block,
    "sqrt": baselines.square_root,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The lowest peak that `auto` reaches, and the node where it is."""

    floor_bytes: int
    node: str
    hint: str


class StepSchedules(NamedTuple):
    """The graphs of a step, each with its schedule, and the peak of the step under these schedules."""

    peak_bytes: int
    graphs: tuple[Graph, ...]


class Planner:
    """Plans for one step. What serves every budget is worked out once, when first needed."""

    @rarely_collected()
    def __init__(self, step: Step) -> None:
        self.step = step
        self.table = make_table(step)

    @cached_property
    def plain(self) -> Timeline:
        return simulate(self.step, plain_runs(self.step))

    @cached_property
    def eager_peak_bytes(self) -> int:
        return eager_timeline(self.step).peak_bytes

    @cached_property
    def bounds(self) -> Bounds:
        return Bounds(self.table)

    @cached_property
    def problem(self) -> StepProblem:
        return StepProblem(self.table, self.plain)

    @cached_property
    @rarely_collected()
    def auto(self) -> Auto:
        table = self.table
        lowest = min(range(len(self.prefixes)), key=lambda last: self.prefixes[last].peak_bytes)
        others = [BASELINES[name](table) for name in BASELINES if name != "none"]
        return Auto(
            self.problem,
            self.bounds,
            [*others, mu_two.plan_of(table, self.prefixes, lowest)],
            lambda level: _first_prefix(self, level),
            self.spread,
        )

    @cached_property
    def spread(self) -> Spread | None:
        """The plans of a step with fewer of the equal blocks, where this one has many."""
        found = representative(self.step)
        if found is None:
            return None
        short = Planner(found.step)
        return Spread(found, short.problem, self.problem, [e.order for e in short.auto.archive.entries])

    @cached_property
    def prefixes(self) -> list[mu_two.Prefix]:
        return mu_two.policy(self.table, self.activations)

    @cached_property
    def activations(self) -> tuple[Activation, ...]:
        return activations(self.step, self.table.uses)

    @cached_property
    def reserve(self) -> Reserve:
        return reserve(self.step)

    def timeline(self, plan: RematSet, *, budget_bytes: int = 0) -> Timeline:
        """What a plan holds and costs; what may stand elsewhere does so for `budget_bytes`."""
        return simulate(self.step, without_needless_runs(self.step, schedule_of(self.table, plan)))

    def _best_timeline(self, entry: ArchiveEntry, budget_bytes: int) -> Timeline:
        """Of `auto`, or of `mu-two` where that is cheaper for once."""
        other = next((prefix for prefix in self.prefixes if prefix.peak_bytes <= budget_bytes), None)
        if other is not None and other.recompute_seconds < entry.seconds:
            plan = _first_prefix(self, budget_bytes)
            assert plan is not None
            return self.timeline(plan)
        return self.auto.timeline(entry)

    def best(self, budget_bytes: int) -> Timeline | None:
        """The cheapest way to run the step that `auto` finds with a peak of at most `budget_bytes`."""
        entry = self.auto.best(budget_bytes)
        return None if entry is None else self._best_timeline(entry, budget_bytes)

    def floor(self) -> Floor:
        """The lowest reachable peak. `solve` with exactly this budget succeeds."""
        timeline = self.lowest()
        hint = floor_hint(self.step, timeline)
        return Floor(floor_bytes=timeline.peak_bytes, node=timeline.peak_node, hint=hint)

    def lowest(self) -> Timeline:
        """The step with its lowest peak."""
        return self.auto.timeline(self.auto.archive.entries[0])

    @property
    def floor_bytes(self) -> int:
        return self.auto.archive.entries[0].peak_bytes

    def adapt(self, schedules: Sequence[Sequence[GraphRun]], *, budget_bytes: int) -> StepSchedules | None:
        """The schedules of another step with the same graphs, mended where they do not fit here.

        None where these graphs have no such ops, or where that takes a search of its own.
        """
        try:
            timeline = self.repaired(runs_of_schedules(self.step, schedules), budget_bytes=budget_bytes)
        except (KeyError, ValueError):  # the ops are others
            return None
        if timeline is None:
            return None
        return StepSchedules(timeline.peak_bytes, graph_schedules(self.step, timeline.runs))

    def repaired(self, runs: Sequence[Run], *, budget_bytes: int) -> Timeline | None:
        """A schedule close to `runs` that fits; None where a short search finds none."""
        order = self.problem.repaired(runs, budget_bytes=budget_bytes)
        return None if order is None else self.problem.timeline(order)

    @rarely_collected()
    def solve(self, *, budget_bytes: int, planner: str = "auto", may_be_eager: bool = False) -> Solution:
        """The cheapest schedule that `planner` finds with a peak of at most `budget_bytes`.

        BudgetTooSmall when it finds none; then its `floor_bytes` is the lowest peak this planner
        reaches. Only `auto` searches for the lowest peak of all, so that only its solutions tell it.
        `may_be_eager` is for who can leave the model to eager PyTorch where that alone fits.
        """
        if planner not in PLANNERS:
            raise LowtideError(f"there is no planner '{planner}': choose one of {', '.join(PLANNERS)}")
        timeline = self.best(budget_bytes) if planner == "auto" else self.by_another(planner, budget_bytes)
        if timeline is None or timeline.peak_bytes > budget_bytes:
            if may_be_eager and planner in MAY_BE_EAGER and self.eager_peak_bytes <= budget_bytes:
                plain = self._solution(planner, self.plain, budget_bytes)
                return replace(plain, peak_bytes=self.eager_peak_bytes, eager=True, lower_bound_seconds=0.0)
            raise _too_small(self, planner, budget_bytes, timeline)
        return self._solution(planner, timeline, budget_bytes)

    def by_another(self, planner: str, budget_bytes: int) -> Timeline | None:
        """What a planner besides `auto` makes of a budget; None where it finds nothing within."""
        plan = _first_prefix(self, budget_bytes) if planner == "mu-two" else BASELINES[planner](self.table)
        return None if plan is None else self.timeline(plan)

    def _solution(self, planner: str, timeline: Timeline, budget_bytes: int) -> Solution:
        step_in_backward = any(node.op == UPDATE for node in self.step.nodes)
        taken = None if step_in_backward else optimizer_step(self.step, timeline, budget_bytes)
        return Solution(
            planner=planner,
            fingerprint=self.step.fingerprint,
            budget_bytes=budget_bytes,
            peak_bytes=timeline.peak_bytes if taken is None else max(timeline.peak_bytes, taken.peak_bytes),
            peak_node=timeline.peak_node,
            baseline_peak_bytes=self.eager_peak_bytes,
            floor_bytes=self.floor_bytes if planner == "auto" else None,
            step_seconds=self.plain.seconds,
            recompute_seconds=max(0.0, timeline.added_seconds),
            decisions=decide(
                self.table,
                self.activations,
                plain=self.plain,
                planned=timeline,
                budget_bytes=budget_bytes,
            ),
            schedule=Schedule(runs=timeline.runs),
            graphs=graph_schedules(self.step, timeline.runs),
            identity=self.step.identity,
            reserve=self.reserve if taken is None else taken.reserved(self.reserve),
            device=self.step.device,
            static_bytes=self.step.static_bytes,
            step_in_backward=step_in_backward,
            optimizer_chunk_bytes=0 if taken is None else taken.piece_bytes,
            holds_outputs=self.step.holds_outputs,
            lower_bound_seconds=self._lower_bound(timeline, budget_bytes),
            floor_bound_bytes=self.floor_bound(),
            offload=_offload(self.step, timeline),
            gradient_strides=self.step.gradient_strides,
        )

    def floor_bound(self) -> int | None:
        """No plan has a lower peak, whatever ways it takes; None where nobody knows."""
        return self.bounds.floor_bytes

    def _lower_bound(self, timeline: Timeline, budget_bytes: int) -> float | None:
        if timeline.peak_bytes > budget_bytes:  # a step that is left to eager
            return 0.0
        proven = self.bounds.seconds(budget_bytes)
        assert proven <= timeline.added_seconds * (1 + 1e-9) + 1e-12, (proven, timeline.added_seconds)
        return min(proven, timeline.added_seconds)

    def tradeoff(self, *, points: int = 50) -> list[Solution]:
        """The curve of `auto`: a plan for each of `points` budgets, from the plain peak to the floor."""
        if points < 1:
            raise LowtideError(f"a curve needs at least one point, not {points}")
        high, low = self.eager_peak_bytes, self.floor_bytes
        budgets = [high - (high - low) * i // max(1, points - 1) for i in range(points)]
        return [self.solve(budget_bytes=budget, may_be_eager=bool(self.step.graphs)) for budget in budgets]


def floor(step: Step) -> Floor:
    """The lowest reachable peak of a step."""
    return Planner(step).floor()


def solve(step: Step, *, budget_bytes: int, planner: str = "auto") -> Solution:
    """One plan; for several budgets of the same step, keep a `Planner`."""
    return Planner(step).solve(budget_bytes=budget_bytes, planner=planner)


def tradeoff(step: Step, *, points: int = 50) -> list[Solution]:
    """The curve of `auto` for a step."""
    return Planner(step).tradeoff(points=points)


def _offload(step: Step, timeline: Timeline) -> Offload | None:
    traffic = timeline.traffic
    if step.transfer_speed is None or traffic is None:
        return None
    return Offload(
        transfer_speed=step.transfer_speed,
        store_bytes=traffic.store_bytes,
        transfer_seconds=traffic.transfer_seconds,
        stall_seconds=traffic.stall_seconds,
        slowed_seconds=traffic.slowed_seconds,
    )


def _first_prefix(desk: Planner, budget_bytes: int) -> RematSet | None:
    for last, prefix in enumerate(desk.prefixes):
        if prefix.peak_bytes <= budget_bytes:
            return mu_two.plan_of(desk.table, desk.prefixes, last)
    return None


def _too_small(desk: Planner, planner: str, budget_bytes: int, timeline: Timeline | None) -> BudgetTooSmall:
    lowest = desk.floor()
    if planner == "auto":
        return BudgetTooSmall(
            budget_bytes=budget_bytes, floor_bytes=lowest.floor_bytes, node=lowest.node, hint=lowest.hint
        )
    if timeline is None:
        prefixes = desk.prefixes
        last = min(range(len(prefixes)), key=lambda i: prefixes[i].peak_bytes)
        timeline = desk.timeline(mu_two.plan_of(desk.table, prefixes, last))
    hint = f"This is what planner '{planner}' reaches; "
    if lowest.floor_bytes <= budget_bytes:
        hint += "planner 'auto' meets this budget."
    else:
        hint += f"planner 'auto' reaches {size_and_bytes(lowest.floor_bytes)}. {lowest.hint}"
    return BudgetTooSmall(
        budget_bytes=budget_bytes, floor_bytes=timeline.peak_bytes, node=timeline.peak_node, hint=hint
    )
