"""A plan: a decision for each activation, and how to apply them."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.errors import PlanMismatch
from lowtide.facts import Action, Decision, Solution, Step
from lowtide.facts.files import write_atomic
from lowtide.facts.gpus import gpu_behind
from lowtide.facts.serial import load_json, save_json, solution_from_dict, solution_to_dict
from lowtide.planning.activations import activations
from lowtide.planning.log_lines import kind_of
from lowtide.planning.schedules import eager_timeline
from lowtide.planning.simulate import Timeline, simulate
from lowtide.report.notebook import as_text, card, plan_rows, timeline_svg
from lowtide.report.resting import resting_text
from lowtide.report.results import Measurement, environment_here
from lowtide.stage_log import stage
from lowtide.units import format_size

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

    from lowtide.profiling.costing import KnownCosts
    from lowtide.runtime.executor import Executor
    from lowtide.runtime.loop_reserve import LossReserve
    from lowtide.trace.model_call import Loop, Optimizers
    from lowtide.trace.segments import TracedModel


@dataclass(frozen=True)
class Plan:
    """Which activations to keep, to recompute and to offload; made by `Profile.plan`.

    Peaks are predicted; `lowtide.verify` measures them.
    """

    solution: Solution
    known: "KnownCosts | None" = field(default=None, repr=False, compare=False)
    loop: "Loop | None" = field(default=None, repr=False, compare=False)
    traced: "TracedModel | None" = field(default=None, repr=False, compare=False)
    step: Step | None = field(default=None, repr=False, compare=False)
    executor: "Executor | None" = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        recomputed = sum(decision.action is Action.RECOMPUTE for decision in self.decisions)
        offloaded = sum(decision.action is Action.OFFLOAD for decision in self.decisions)
        return (
            f"Plan(budget={self._budget}, peak={format_size(self.peak_bytes)}, "
            f"overhead={self.overhead:.1%}, planner={self.planner}, {self._calls}"
            f"{self._rounds}{self._estimated_for}"
            f"{recomputed} of {len(self.decisions)} activations recomputed"
            f"{f', {offloaded} offloaded' if offloaded else ''}"
            f"{f', {text} rest on the store' if (text := resting_text(self.solution)) else ''})"
        )

    @property
    def _budget(self) -> str:
        if self.reserved_budget_bytes is None:
            return format_size(self.budget_bytes)
        reserved = f"{format_size(self.reserved_budget_bytes)} reserved"
        return f"{reserved}, reserved={format_size(self.reserved_bytes or 0)}"

    @property
    def _rounds(self) -> str:
        return f"rounds={','.join(self.rounds)}, " if self.rounds else ""

    @property
    def _calls(self) -> str:
        return f"calls={self.solution.calls}, " if self.solution.calls > 1 else ""

    @property
    def _estimated_for(self) -> str:
        return "" if gpu_behind(self.solution.device) is None else f"device={self.solution.device}, "

    @property
    def planner(self) -> str:
        return self.solution.planner

    @property
    def budget_bytes(self) -> int:
        return self.solution.budget_bytes

    @property
    def peak_bytes(self) -> int:
        """The planned step's predicted peak."""
        return self.solution.peak_bytes

    @property
    def reserved_bytes(self) -> int | None:
        """The most that the device's allocator is predicted to reserve; None on a CPU."""
        return None if self.solution.reserved is None else self.solution.reserved.most_bytes

    @property
    def reserved_budget_bytes(self) -> int | None:
        """The budget of reserved bytes; None where the budget is of live bytes."""
        return None if self.solution.reserved is None else self.solution.reserved.budget_bytes

    @property
    def baseline_peak_bytes(self) -> int:
        """The predicted peak of the step without a plan."""
        return self.solution.baseline_peak_bytes

    @property
    def recompute_seconds(self) -> float:
        return self.solution.recompute_seconds

    @property
    def rounds(self) -> tuple[str, ...]:
        """The parts of the step that the plan runs with other bits than eager's (`"head"`); empty for an
        exact plan, also where rounding was allowed and not used."""
        return self.solution.rounds

    @property
    def overhead(self) -> float:
        """Recompute time as a fraction of the baseline's time."""
        return self.solution.overhead

    @property
    def lower_bound_seconds(self) -> float | None:
        """Proven: no plan within the budget adds fewer seconds; None for plans of earlier versions."""
        return self.solution.lower_bound_seconds

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """One row per activation."""
        return self.solution.decisions

    @cached_property
    def loss_reserve(self) -> "LossReserve | None":
        """Schedules that reserve bytes for an unknown loss; found once, when the plan is applied."""
        from lowtide.runtime.loop_reserve import loss_reserve_for

        return loss_reserve_for(self)

    @stage("apply", given=lambda plan, *_, **__: repr(plan), made=kind_of)
    def apply(
        self,
        model: "nn.Module",
        *,
        optimizer: "Optimizers | None" = None,
        process_group: "ProcessGroup | None" = None,
    ) -> "nn.Module":
        """Let `model` train by this plan, in place; returns the same object.

        Another batch shape gets its own plan for the same budget at its first call. A plan from a file
        that steps in backward, or in chunks, needs the `optimizer`. Of a DistributedDataParallel the model
        inside gets the plan. Where several processes train the model (those of `process_group`, by default
        of the wrapper's, or all), each has to call this, with the same plan.
        """
        from lowtide.optim.joined_optimizers import join_optimizers
        from lowtide.parallel.rank_failure import guard_ranks
        from lowtide.parallel.ranks import check_together, ranks_of
        from lowtide.runtime.apply import apply_plan
        from lowtide.torch_compat.ddp import unwrapped
        from lowtide.trace.identity import identify_model

        is_alone = self.solution.pipeline and process_group is None  # other processes have other stages
        inner, ranks = unwrapped(model), None if is_alone else ranks_of(model, process_group)
        if ranks is not None:
            check_together(ranks, self, lambda: check_identity(self, identify_model(inner)))
        apply_plan(self, inner, optimizer=join_optimizers(optimizer))
        guard_ranks(model, process_group, in_pipeline=self.solution.pipeline)
        return model

    def summary(self) -> str:
        """Budget, peak, what is saved and what it costs, in a few lines."""
        return as_text(f"Plan by '{self.planner}'", plan_rows(self.solution))

    def report(self, path: str | Path) -> Path:
        """Write a page with the timelines without and with the plan, and every decision; returns its path.

        A plan from a file knows its decisions only: plan the profile again for the rest.
        """
        return write_report(path, self, title=f"Plan for {format_size(self.budget_bytes)}")

    def _repr_html_(self) -> str:
        before, after = timelines(self)
        picture = timeline_svg(after, other=before, budget_bytes=self.budget_bytes) if after else ""
        return card(repr(self), plan_rows(self.solution), picture)

    def to_csv(self, folder: str | Path) -> list[Path]:
        """Write `ac_decisions.csv`."""
        from lowtide.report.exports import write_decisions

        return [
            write_decisions(Path(folder) / "ac_decisions.csv", self.decisions, device=self.solution.device)
        ]

    def save(self, path: str | Path) -> None:
        """Write a `plan.json` that `lowtide.load_plan` reads; the same plan gives the same bytes."""
        save_json(Path(path), solution_to_dict(self.solution))


def timelines(plan: Plan) -> tuple[Timeline | None, Timeline | None]:
    """The timelines of eager and of the plan; None for a plan from a file. For a plan that rounds, eager's is
    that of the rounding form: both show the same ops."""
    if plan.step is None:
        return None, None
    before = eager_timeline(plan.step)
    return before, simulate(plan.step, plan.solution.schedule.runs)


def write_report(path: str | Path, plan: Plan, *, title: str, measurement: Measurement | None = None) -> Path:
    """Write the page of a plan, with its measurements."""
    from lowtide.report.html import render_report

    before, after = timelines(plan)
    page = render_report(
        title=title,
        environment=environment_here(machine=plan.solution.device),
        step=plan.step,
        before=before,
        after=after,
        solution=plan.solution,
        activations=activations(plan.step) if plan.step is not None else (),
        measurement=measurement,
    )
    return write_atomic(Path(path), page)


def with_note(plan: Plan, note: str) -> Plan:
    """The plan with one more note for its reader."""
    return replace(plan, solution=replace(plan.solution, notes=(*plan.solution.notes, note)))


def expectation(plan: Plan) -> str:
    """One line: the predicted peak, the budget, the added time, and the batch that these are for."""
    found = plan.solution.reserved
    if found is not None and found.budget_bytes is not None:
        peak, of = f"{format_size(found.most_bytes)} reserved", format_size(found.budget_bytes)
        baseline_bytes, fits = found.baseline_bytes, found.baseline_bytes <= found.budget_bytes
    else:
        peak, of = format_size(plan.peak_bytes), format_size(plan.budget_bytes)
        baseline_bytes, fits = plan.baseline_peak_bytes, plan.baseline_peak_bytes <= plan.budget_bytes
    cost = f"{plan.overhead:.1%} more time"
    if fits:
        cost = (
            "fits without a plan" if not plan.recompute_seconds else f"fits without a plan, {cost} with this"
        )
    before = format_size(baseline_bytes)
    without = "" if fits and before == peak else f" ({before} without a plan)"
    if plan.rounds:
        cost += f", rounds ({','.join(plan.rounds)}): not equal to eager to the last bit"
    calls = f", {plan.solution.calls} calls before a backward pass" if plan.solution.calls > 1 else ""
    return (
        f"predicted peak {peak} of {of}{without}, {cost}, for {dict(plan.solution.identity)['batch']}{calls}"
    )


def load_plan(path: str | Path) -> Plan:
    """A plan from `plan.json`."""
    return Plan(solution_from_dict(load_json(Path(path)), path=Path(path)))


def check_identity(plan: Plan, found: tuple[tuple[str, str], ...]) -> None:
    """Raise PlanMismatch where a plan is for another model, batch or torch; the message says what differs."""
    made_for = dict(plan.solution.identity)
    for what, value in found:
        if made_for.get(what, value) != value:
            raise PlanMismatch(
                f"this plan was made for the {what} '{made_for[what]}', and here is '{value}'. "
                "Profile and plan again"
            )
