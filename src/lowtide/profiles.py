"""A profiled training step, its plans and its reports."""

import logging
import os
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lowtide.errors import BudgetTooSmall, LowtideError
from lowtide.facts import UPDATE, Activation, Node, Solution, Step
from lowtide.facts.auto_budget import AutoBudget, auto_budget, gpu_budget, host_memory
from lowtide.facts.files import write_atomic
from lowtide.facts.gpus import ESTIMATED, gpu_behind
from lowtide.facts.levers import lever_lines
from lowtide.facts.serial import load_step, save_step
from lowtide.facts.sizes import is_auto, split_reserved, step_budget
from lowtide.planning.activations import activations
from lowtide.planning.allocator import caches_blocks, expandable_segments, reserved_for
from lowtide.planning.log_lines import decision_line
from lowtide.planning.lower_bounds import Bounds
from lowtide.planning.planner import MAY_BE_EAGER, Planner
from lowtide.planning.repeated_calls import step_of_calls
from lowtide.planning.repeated_graphs import planner_for
from lowtide.planning.reserved_budget import baseline_reserved, check_reserves, simulated, solve_on_device
from lowtide.planning.resting_sets import resting_form
from lowtide.planning.rounded_step import ROUNDS, beside_exact, chosen, lower
from lowtide.planning.schedules import as_eager, eager_timeline, reserve
from lowtide.planning.simulate import Timeline, simulate
from lowtide.plans import Plan, with_note
from lowtide.report.notebook import as_text, card, profile_rows, timeline_svg
from lowtide.report.results import environment_here
from lowtide.stage_log import say, stage
from lowtide.units import format_size

if TYPE_CHECKING:
    from lowtide.lever_search import LeverSearch
    from lowtide.profiling.costing import KnownCosts
    from lowtide.trace.model_call import Loop
    from lowtide.trace.segments import TracedModel


_log = logging.getLogger("lowtide")

EXACT_FORM = (
    "a profile.json holds the exact form of a step alone, and plans of it do not round: save the plan as well"
)


@dataclass(frozen=True)
class Profile:
    """Where the memory and the time of one training step go; made by `lowtide.profile`.

    All bytes are predicted from the captured graphs; `seconds` are measured op by op, or estimated for an
    absent GPU, which `step.device` names. Where the loop calls the model several times before its first
    backward pass, `step` has all of these calls, and `call` has one of them.
    """

    step: Step
    known: "KnownCosts | None" = field(default=None, repr=False, compare=False)
    loop: "Loop | None" = field(default=None, repr=False, compare=False)
    traced: "TracedModel | None" = field(default=None, repr=False, compare=False)
    lever_search: "LeverSearch | None" = field(default=None, repr=False, compare=False)
    rounded: Step | None = field(default=None, repr=False, compare=False)
    call: Step | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, step: Step, **others: Any) -> Self:
        """The profile of the step that makes `step.calls` such calls; `others` are its fields."""
        if step.calls == 1:
            return cls(step, **others)
        return cls(step_of_calls(step, step.calls), call=step, **others)

    def __repr__(self) -> str:
        """One line; the floor is left out, since it takes a search."""
        calls = f", {self.step.calls} calls" if self.call is not None else ""
        return (
            f"Profile(peak={format_size(self.peak_bytes)}, {len(self.nodes)} nodes on {self.step.device}"
            f"{calls})"
        )

    @property
    def one_call(self) -> Step:
        """The step of one call of the model."""
        return self.step if self.call is None else self.call

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Every op of forward, backward and optimizer, in the order they run."""
        return self.step.nodes

    @cached_property
    def activations(self) -> tuple[Activation, ...]:
        """Every forward value that backward reads again."""
        return activations(self.step)

    @cached_property
    def timeline(self) -> Timeline:
        """Bytes live during every op of the baseline, the step as eager PyTorch runs it."""
        return eager_timeline(self.step)

    @cached_property
    def peak_bytes(self) -> int:
        """The baseline's peak, without any recompute; on an accelerator, in the blocks of its allocator."""
        if not caches_blocks(self.step.device):
            return self.timeline.peak_bytes
        return max(self.timeline.peak_bytes, baseline_reserved(self.step, os.environ).allocated_bytes)

    @cached_property
    def floor_bytes(self) -> int:
        """The lowest peak that a plan reaches, never above the baseline's: a plan may be eager itself. On an
        accelerator, in the blocks of its allocator."""
        lowest = self._lowest_of(self._planner)
        if self._rounded_planner is not None:
            lowest = min(lowest, self._lowest_of(self._rounded_planner))
        return min(lowest, self.peak_bytes) if self.step.graphs else lowest

    def _lowest_of(self, planner: Planner) -> int:
        lowest = planner.floor().floor_bytes
        if not caches_blocks(self.step.device):
            return lowest
        may_be_eager = bool(self.step.graphs) and planner is self._planner
        solution = planner.solve(budget_bytes=lowest, planner="auto", may_be_eager=may_be_eager)
        expandable = expandable_segments(os.environ)
        return max(lowest, simulated(planner.step, solution, expandable=expandable).allocated_bytes)

    @property
    def floor_bound_bytes(self) -> int | None:
        """No plan has a lower peak; None where that is unknown."""
        bound = self._planner.floor_bound() if self.rounded is None else None
        return None if bound is None or bound > self.floor_bytes else bound

    @property
    def bounds(self) -> Bounds:
        """The proven bounds of all plans that run the ops of the step one by one."""
        return self._planner.bounds

    @property
    def step_seconds(self) -> float:
        return self.timeline.seconds

    def plan(self, budget: str | int, planner: str = "auto", *, executor: str = "eager") -> Plan:
        """What to recompute so that the step's peak is at most `budget`.

        `BudgetTooSmall` where no plan fits. Its `levers` say what would lower the floor, as long as model,
        batch and optimizer of the profile are alive.

        Args:
            budget: Bytes, a size (`"8GiB"`), a share of the baseline's peak (`"60%"`), or `"auto"`: what the
                device has free now, with what the step already has there, less a reserve; one line says the
                sum. For an accelerator, `"20GiB reserved"` bounds the bytes that the device's allocator
                reserves, which run out first; a share is then one of what the baseline reserves.
            planner: `"auto"`, or the name of another planner (`lowtide plan --help` lists them).
            executor: What runs the graphs; with `"inductor"` they are compiled here, and the peak is that of
                the compiled code.
        """
        if split_reserved(budget)[1]:
            check_reserves(self.step.device, budget)
        if is_auto(budget):
            found = auto_budget_of(self)
            say(found.line)
            return with_note(self.plan(found.text(budget), planner, executor=executor), found.line)
        return self._planned(budget, planner, executor)

    @stage(
        "plan",
        given=lambda profile, budget, planner, executor: (
            f"{profile!r}, {budget!r} by '{planner}' on {executor}"
        ),
        made=repr,
        details=lambda plan: map(decision_line, plan.decisions),
    )
    def _planned(self, budget: str | int, planner: str, executor: str) -> Plan:
        if executor != "eager":
            return self._compiled_plan(self._budget_bytes(budget, executor), planner, executor)
        try:
            solution = self._solved(budget, planner)
        except BudgetTooSmall as error:
            self._name_levers(error)
            raise
        notes = self.step.notes
        if solution.rounds:
            notes = (*notes, ROUNDS.format(what=",".join(solution.rounds)))
        if gpu_behind(self.step.device) is not None:
            notes = (*notes, self._allocator_note(solution))
        return self._as_plan(replace(solution, notes=notes))

    def _name_levers(self, error: BudgetTooSmall) -> None:
        """Add what lowers the floor to a refusal, unless planner 'auto' meets the budget as it is."""
        if self.lever_search is None or error.of or self._planner.floor().floor_bytes <= error.budget_bytes:
            return
        found = self.lever_search.find(self._planner, floor_bytes=self.floor_bytes)
        error.name_levers(found, lever_lines(found, budget_bytes=error.budget_bytes))

    def _budget_bytes(self, budget: str | int, executor: str = "eager") -> int:
        """Bytes of a budget; a share is one of the baseline's peak, or of what the baseline reserves."""
        text, is_reserved = split_reserved(budget)
        if is_reserved and executor != "eager":
            raise LowtideError(
                f"reserved bytes are predicted for executor 'eager' alone: leave executor={executor!r} or "
                "'reserved' out"
            )
        whole = baseline_reserved(self.step, os.environ).reserved_bytes if is_reserved else self.peak_bytes
        return step_budget(text, whole=whole)

    def _solved(self, budget: str | int, planner: str) -> Solution:
        """The exact solution, or that of the form that rounds, where the user allows it and it helps."""
        if self._rounded_planner is None:
            return self._solved_by(self._planner, budget, planner)
        exact, refused = self._or_refused(self._planner, budget, planner)
        rounded, also_refused = self._or_refused(self._rounded_planner, budget, planner)
        solution = chosen(exact, rounded and beside_exact(rounded, self._planner))
        if solution is None:
            assert refused is not None and also_refused is not None
            raise lower(refused, also_refused)
        return solution if solution.floor_bytes is None else replace(solution, floor_bytes=self.floor_bytes)

    def _or_refused(
        self, one: Planner, budget: str | int, planner: str
    ) -> tuple[Solution | None, BudgetTooSmall | None]:
        try:
            return self._solved_by(one, budget, planner), None
        except BudgetTooSmall as refused:
            return None, refused

    def _solved_by(self, one: Planner, budget: str | int, planner: str) -> Solution:
        budget_bytes, is_exact = self._budget_bytes(budget), one is self._planner
        may_be_eager = bool(self.step.graphs) and is_exact

        def solve(nbytes: int) -> Solution:
            return one.solve(budget_bytes=nbytes, planner=planner, may_be_eager=may_be_eager)

        def eager() -> Solution:
            return self._planner.eager_solution(planner, budget_bytes)

        if not caches_blocks(self.step.device):
            return solve(budget_bytes)
        reserved_budget_bytes = budget_bytes if split_reserved(budget)[1] else None
        return solve_on_device(
            one.step,
            solve,
            eager=eager if may_be_eager and planner in MAY_BE_EAGER else None,
            budget_bytes=budget_bytes,
            reserved_budget_bytes=reserved_budget_bytes,
            environment=os.environ,
        )

    def _allocator_note(self, solution: Solution) -> str:
        step = as_eager(self.step) if solution.eager else resting_form(self.step, solution.resting)
        timeline = self.timeline if solution.eager else simulate(step, solution.schedule.runs)
        allocated, _, reserved = reserved_for(step, timeline)
        return (
            f"the GPU's allocator should reserve {format_size(allocated)} to {format_size(reserved)} for "
            f"this plan ({ESTIMATED}): the upper end counts the gaps between blocks"
        )

    def tradeoff(self, points: int = 50, *, offload: bool = True, swap: bool = True) -> list[Plan]:
        """Plans from the baseline's peak down to the floor, evenly spaced in bytes.

        `offload=False`: plans that use no store, where the profile has one; `swap` is its earlier name.
        """
        if self.rounded is not None:
            high, low = self.peak_bytes, self.floor_bytes
            budgets = [high - (high - low) * i // max(1, points - 1) for i in range(points)]
            return [self._planned(budget, "auto", "eager") for budget in budgets]
        planner = self._planner if offload and swap else self._planner.without_offload
        return [self._as_plan(solution) for solution in planner.tradeoff(points=points)]

    def to_csv(self, folder: str | Path) -> list[Path]:
        """Write `node_stats.csv` and `activation_stats.csv`."""
        from lowtide.report.exports import write_activation_stats, write_node_stats

        out = Path(folder)
        return [
            write_node_stats(out / "node_stats.csv", self.step, self.timeline),
            write_activation_stats(out / "activation_stats.csv", self.activations, device=self.step.device),
        ]

    def summary(self) -> str:
        """The peak, its node and its kinds, in a few lines."""
        return as_text("Profile of one training step", profile_rows(self.step, self.timeline))

    def report(self, path: str | Path) -> Path:
        """Write a page with the timeline, the peak and where the time goes; returns its path."""
        from lowtide.report.html import render_report

        page = render_report(
            title="Profile of one training step",
            environment=environment_here(machine=self.step.device),
            step=self.step,
            before=self.timeline,
            activations=self.activations,
        )
        return write_atomic(Path(path), page)

    def _repr_html_(self) -> str:
        return card(repr(self), profile_rows(self.step, self.timeline), timeline_svg(self.timeline))

    def save(self, path: str | Path) -> None:
        """Write a `profile.json` that `lowtide.load_profile` reads."""
        if self.rounded is not None:
            _log.warning(EXACT_FORM)
        save_step(path, self.one_call)

    def _compiled_plan(self, budget_bytes: int, planner: str, name: str) -> Plan:
        from lowtide.runtime.executor import InductorOps, executor_named, solve_compiled

        executor = executor_named(name)
        assert isinstance(executor, InductorOps)
        self._check_compilable()
        assert self.traced is not None
        solution = solve_compiled(
            self._planner, self.traced.graph.segment, executor, budget_bytes=budget_bytes, planner=planner
        )
        return replace(self._as_plan(replace(solution, notes=self.step.notes)), executor=executor)

    def _check_compilable(self) -> None:
        """Raise LowtideError for options that Inductor's code does not support."""
        reason, gpu = "", gpu_behind(self.step.device)
        if gpu is not None:
            reason = f"compiles for the device at hand, and the {gpu.name} is not there: leave `device` out"
        elif sum(graph.in_model for graph in self.step.graphs) > 1:
            reason = "is for models of one graph, and this one breaks into several"
        elif self.step.transfer_speed is not None:
            reason = "cannot offload: leave `offload` out"
        elif self.call is not None:
            reason = "plans one call of the model for each backward pass: leave `calls` out"
        elif self.rounded is not None:
            reason = "compiles the exact form of a step alone: leave `rounds` out"
        elif any(node.op == UPDATE for node in self.step.nodes):
            reason = "cannot step in backward: leave `step_in_backward` out"
        elif self.traced is None and self.loop is not None:
            reason = "is for models of one graph, and this one runs code outside of it"
        elif self.traced is None:
            reason = "compiles the graphs that `lowtide.profile` has just captured, and this profile has none"
        if reason:
            raise LowtideError(f"executor 'inductor' {reason}; or choose executor 'eager'")

    def _as_plan(self, solution: Solution) -> Plan:
        known = None if self.known is None else self.known.without_runs()
        form = self.rounded if solution.rounds and self.rounded is not None else self.step
        step = resting_form(form, solution.resting)
        solution = replace(solution, pipeline=self.step.pipeline)
        if self.call is not None:
            solution = replace(
                solution,
                calls=self.call.calls,
                graphs=solution.graphs[: len(self.call.graphs)],
                reserve=reserve(self.call),
            )
        return Plan(solution, known=known, loop=self.loop, traced=self.traced, step=step)

    @cached_property
    def _planner(self) -> Planner:
        return planner_for(self.step)

    @cached_property
    def _rounded_planner(self) -> Planner | None:
        return None if self.rounded is None else planner_for(self.rounded)


def auto_budget_of(profile: Profile) -> AutoBudget:
    """The budget `auto` of a step, by the memory of its device now, for this process alone."""
    device, gpu = profile.step.device, gpu_behind(profile.step.device)
    if gpu is not None:
        return gpu_budget(gpu)
    if device == "cpu" and profile.loop is None:
        return auto_budget([host_memory()])
    from lowtide.profiling.free_memory import free_memory

    return auto_budget([free_memory(device, profile.loop)])


def load_profile(path: str | Path) -> Profile:
    """A profile from `profile.json`."""
    return Profile.of(load_step(path))
