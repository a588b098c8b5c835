"""From a step and a budget in bytes to a `Solution`: a schedule within the budget, decisions and bounds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from lowtide.errors import BudgetTooSmall, LowtideError
from lowtide.facts import UPDATE, Activation, Graph, GraphRun, Offload, Reserve, Schedule, Solution, Step
from lowtide.garbage import rarely_collected
from lowtide.planning.decisions import Hint, decide, floor_hint
from lowtide.planning.lower_bounds import Bounds
from lowtide.planning.planning_problem import PlanningProblem
from lowtide.planning.registry import call_planner
from lowtide.planning.schedules import (
    eager_timeline,
    graph_schedules,
    optimizer_step,
    reserve,
    runs_of_schedules,
)
from lowtide.planning.search.table import RematSet, Table
from lowtide.planning.simulate import Timeline
from lowtide.planning.variants import (
    Variant,
    VariantsSearch,
    as_chunks,
    as_ops,
    chunk_variant,
    chunks_of,
    step_without_offload,
    variants,
)
from lowtide.units import size_and_bytes

MAY_BE_EAGER = ("auto", "mu-two", "none")
"""Planners that recompute nothing where nothing needs to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The lowest peak that `auto` reaches, and the node where it is."""

    floor_bytes: int
    node: str
    hint: Hint


class StepSchedules(NamedTuple):
    """The graphs of a step, each with its schedule, and the peak of the step under these schedules."""

    peak_bytes: int
    graphs: tuple[Graph, ...]


class Planner:
    """Solutions for one step. What serves every budget is computed once, when first needed.

    `auto` searches the `variants` of the step; without any, the step as it is.
    """

    def __init__(self, step: Step, variants: Sequence[Variant] = ()) -> None:
        self.step = step
        self.problem = PlanningProblem(step, variants)

    @property
    def table(self) -> Table:
        return self.problem.table

    @property
    def baseline(self) -> Timeline:
        return self.problem.baseline

    @property
    def bounds(self) -> Bounds:
        return self.problem.bounds

    @property
    def activations(self) -> tuple[Activation, ...]:
        return self.problem.activations

    @cached_property
    def eager_peak_bytes(self) -> int:
        return eager_timeline(self.step).peak_bytes

    @cached_property
    def reserve(self) -> Reserve:
        return reserve(self.step)

    @cached_property
    def without_offload(self) -> "Planner":
        """A planner for the same step without a store."""
        step = step_without_offload(self.step)
        return Planner(step, variants(step))

    @property
    def search(self) -> VariantsSearch:
        """What `auto` finds."""
        return self.problem.once(VariantsSearch)

    def timeline(self, remats: RematSet, *, budget_bytes: int = 0) -> Timeline:
        """Simulate a set of remats; transfers are placed for `budget_bytes`."""
        return self.problem.timeline(remats, budget_bytes=budget_bytes)

    def best(self, budget_bytes: int) -> Timeline | None:
        """The cheapest schedule that `auto` finds with a peak of at most `budget_bytes`."""
        return self.search.best(budget_bytes)

    def lowest(self) -> Timeline:
        """The schedule with the lowest peak."""
        return self.search.lowest()

    def lowest_form(self) -> tuple[Step, Timeline]:
        """The schedule with the lowest peak, and the step that it is one of."""
        return self.step, self.lowest()

    @property
    def floor_bytes(self) -> int:
        return self.search.floor_bytes

    def floor(self) -> Floor:
        """The lowest reachable peak. `solve` with exactly this budget succeeds."""
        timeline = self.lowest()
        hint = floor_hint(self.step, timeline)
        return Floor(floor_bytes=timeline.peak_bytes, node=timeline.peak_node, hint=hint)

    def adapt(self, schedules: Sequence[Sequence[GraphRun]], *, budget_bytes: int) -> StepSchedules | None:
        """The schedules of another step with the same graphs, changed where they do not fit this step.

        Chains run in chunks as in the schedules, and transfers are placed anew. None where these graphs have
        other ops, or where a search of its own is needed.
        """
        try:
            runs = runs_of_schedules(self.step, schedules)
            chunks = chunks_of(self.step, runs)
            form = next((v.form for v in self.problem.variants if v.chunks == chunks), None)
            form = chunk_variant(self.step, chunks).form if form is None else form
            problem = self.problem if form is self.step else PlanningProblem(form)
            timeline = problem.repaired(as_ops(self.step, runs), budget_bytes=budget_bytes)
        except (KeyError, ValueError):  # the graphs have other ops
            return None
        if timeline is None:
            return None
        return StepSchedules(
            timeline.peak_bytes, graph_schedules(self.step, as_chunks(self.step, timeline.runs, chunks))
        )

    @rarely_collected()
    def solve(self, *, budget_bytes: int, planner: str = "auto", may_be_eager: bool = False) -> Solution:
        """The cheapest schedule that `planner` finds with a peak of at most `budget_bytes`.

        BudgetTooSmall when it finds none: its `floor_bytes` is the lowest peak this planner reaches. Only
        `auto` searches for the floor, so only solutions of `auto` have `floor_bytes`.
        `may_be_eager`: where no schedule fits and eager PyTorch does, the solution is eager.
        """
        timeline = self.planned(planner, budget_bytes)
        if timeline.peak_bytes > budget_bytes:
            if may_be_eager and planner in MAY_BE_EAGER and self.eager_peak_bytes <= budget_bytes:
                return self.eager_solution(planner, budget_bytes)
            raise self._too_small(planner, budget_bytes, timeline, may_be_eager=may_be_eager)
        return self.solution_of(planner, timeline, budget_bytes)

    def eager_solution(self, planner: str, budget_bytes: int) -> Solution:
        """The step as eager PyTorch runs it, whether it is within the budget or not."""
        plain = self.solution_of(planner, self.baseline, budget_bytes)
        return replace(
            plain,
            peak_bytes=self.eager_peak_bytes,
            eager=True,
            lower_bound_seconds=0.0,
            floor_bytes=plain.floor_bytes and self.eager_peak_bytes,
            floor_bound_bytes=None,
        )

    def planned(self, planner: str, budget_bytes: int) -> Timeline:
        """The answer of a planner, simulated; above the budget where the planner finds nothing within."""
        return call_planner(planner, self.problem, budget_bytes)

    def _too_small(
        self, planner: str, budget_bytes: int, reached: Timeline, *, may_be_eager: bool
    ) -> BudgetTooSmall:
        lowest = self.floor()
        if may_be_eager:
            lowest = replace(lowest, floor_bytes=min(lowest.floor_bytes, self.eager_peak_bytes))
        if planner == "auto":
            return BudgetTooSmall(
                budget_bytes=budget_bytes,
                floor_bytes=lowest.floor_bytes,
                node=lowest.node,
                hint=lowest.hint.cause,
                remedy=lowest.hint.remedy,
            )
        hint, remedy = f"This is what planner '{planner}' reaches; ", ""
        if lowest.floor_bytes <= budget_bytes:
            hint += "planner 'auto' meets this budget."
        else:
            hint += f"planner 'auto' reaches {size_and_bytes(lowest.floor_bytes)}. {lowest.hint.cause}"
            remedy = lowest.hint.remedy
        return BudgetTooSmall(
            budget_bytes=budget_bytes,
            floor_bytes=reached.peak_bytes,
            node=reached.peak_node,
            hint=hint,
            remedy=remedy,
        )

    def solution_of(self, planner: str, timeline: Timeline, budget_bytes: int) -> Solution:
        """The solution whose schedule is that of a timeline, in the name of `planner`."""
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
            step_seconds=self.baseline.seconds,
            recompute_seconds=max(0.0, timeline.added_seconds),
            decisions=decide(
                self.table,
                self.activations,
                plain=self.baseline,
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
            optimizer_chunk_bytes=0 if taken is None else taken.chunk_bytes,
            holds_outputs=self.step.holds_outputs,
            lower_bound_seconds=self._lower_bound(timeline, budget_bytes),
            floor_bound_bytes=self.floor_bound(),
            offload=_offload(self.step, timeline),
            gradient_strides=self.step.gradient_strides,
            repeatable=self.step.repeatable,
        )

    def floor_bound(self) -> int | None:
        """No schedule has a lower peak, whatever remats it takes; None where nothing is proven."""
        return self.search.floor_bound_bytes

    def _lower_bound(self, timeline: Timeline, budget_bytes: int) -> float | None:
        """At most the seconds of the schedule: both are sums of floats, and the proven one can be larger by
        rounding."""
        return max(0.0, min(self.search.bound_seconds(budget_bytes), timeline.added_seconds))

    def tradeoff(self, *, points: int = 50) -> list[Solution]:
        """The curve of `auto`: a plan for each of `points` budgets, from the baseline's peak to the floor."""
        if points < 1:
            raise LowtideError(f"a curve needs at least one point, not {points}")
        high, low = self.eager_peak_bytes, self.floor_bytes
        budgets = [high - (high - low) * i // max(1, points - 1) for i in range(points)]
        return [self.solve(budget_bytes=budget, may_be_eager=bool(self.step.graphs)) for budget in budgets]


def _offload(step: Step, timeline: Timeline) -> Offload | None:
    traffic = timeline.traffic
    if step.transfer_speed is None or traffic is None:
        return None
    return Offload(
        transfer_speed=step.transfer_speed,
        store_bytes=traffic.pinned_bytes if step.transfer_speed.store == "host" else traffic.store_bytes,
        transfer_seconds=traffic.transfer_seconds,
        stall_seconds=traffic.stall_seconds,
        slowed_seconds=traffic.slowed_seconds,
        what=step.offload_what or ("activations",),
    )
