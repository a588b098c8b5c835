"""Verify a plan in fresh processes: results equal to the last bit, and the true peak.

Eager and planned training run from the same weights, optimizer state and random state; losses,
gradients, buffers, parameters and the random state after every step are compared with `torch.equal`.
"""

import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lowtide.errors import CannotMoveToFreshProcess, FreshProcessError, PlanMismatch
from lowtide.facts.serial import solution_to_dict
from lowtide.generators import generators_kept
from lowtide.plans import Plan, check_identity, timelines, write_report
from lowtide.report.notebook import card, timeline_svg
from lowtide.runtime.runner import remove
from lowtide.stage_log import stage
from lowtide.trace.identity import identify
from lowtide.trace.model_call import split_batch
from lowtide.trace.step_device import devices_of
from lowtide.units import format_size
from lowtide.verification.comparison import Comparison, compare, looped, planned
from lowtide.verification.fresh_process import run_fresh
from lowtide.verification.measure_step import MOST_SECONDS, Measured, Timing, measure_here, measure_step
from lowtide.verification.rounding import Rounding
from lowtide.verification.verdict import (
    agreement_notes,
    fault_note,
    measurement_of,
    nondeterminism_note,
    prediction_note,
    verdict,
)
from lowtide.zoo.targets import Target, TargetSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The measured results of a plan. Each peak is torch's own count of bytes in a fresh process, and once
    more the resident high-water mark of the process.

    `exact`: planned training equals eager training to the last bit. `recompute_exact` is weaker: planned
    training equals the captured graph without recompute; some models take another path of their code during
    capture. Where a compiler runs the graphs, `exact` means the same, and `from_eager` says how far the
    compiled step without recompute is from eager. Where eager training differs from itself, `exact` is about
    the plan alone: `eager_differences` are eager's own, `nondeterministic_ops` make them, and
    `deterministic_with` is the setting under which eager equals itself and the plan was compared; empty where
    no setting helps. On an accelerator, reserved bytes are the allocator's, from the start of the process;
    predicted are the most. A budget of reserved bytes is `reserved_budget_bytes`. `peak_op` and
    `baseline_peak_op` ran at the peaks that torch counted. `plan` is the verified plan. `rounding` is set for
    a plan that rounds, which is never exact: how far losses and gradients are from eager, beside how far
    eager is from float64. `differences` are then those that rounding does not explain.
    """

    exact: bool
    differences: tuple[str, ...]
    recompute_exact: bool
    budget_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    resident_peak_bytes: int | None
    baseline_predicted_peak_bytes: int
    baseline_measured_peak_bytes: int
    baseline_resident_peak_bytes: int | None
    step_timing: Timing | None
    baseline_step_timing: Timing | None
    fresh_process: bool
    from_eager: str = ""
    peak_op: str = ""
    baseline_peak_op: str = ""
    eager_differences: tuple[str, ...] = ()
    nondeterministic_ops: tuple[str, ...] = ()
    deterministic_with: str = ""
    reserved_budget_bytes: int | None = None
    predicted_reserved_bytes: int | None = None
    measured_reserved_bytes: int | None = None
    baseline_predicted_reserved_bytes: int | None = None
    baseline_measured_reserved_bytes: int | None = None
    plan: Plan | None = field(default=None, repr=False, compare=False)
    rounding: Rounding | None = None

    def __repr__(self) -> str:
        return (
            f"Verification(exact={self.exact}, fits={self.fits}, budget={self._budget}, "
            f"peak={format_size(self.measured_peak_bytes)}, {self._reserved}"
            f"without the plan={format_size(self.baseline_measured_peak_bytes)}, "
            f"{f'rounds: {self.rounding}, ' if self.rounding else ''}{len(self.differences)} differences"
            f"{f', {len(self.eager_differences)} of eager from itself' if self.eager_differences else ''})"
        )

    @property
    def _budget(self) -> str:
        if self.reserved_budget_bytes is None:
            return format_size(self.budget_bytes)
        return f"{format_size(self.reserved_budget_bytes)} reserved"

    @property
    def _reserved(self) -> str:
        if self.measured_reserved_bytes is None:
            return ""
        return f"reserved={format_size(self.measured_reserved_bytes)}, "

    @property
    def step_seconds(self) -> float | None:
        return self.step_timing.median_seconds if self.step_timing else None

    @property
    def baseline_step_seconds(self) -> float | None:
        return self.baseline_step_timing.median_seconds if self.baseline_step_timing else None

    @property
    def overhead(self) -> float | None:
        """Measured time that the plan adds, as a fraction of eager's."""
        if self.step_timing is None or self.baseline_step_timing is None:
            return None
        return self.step_timing.added_to(self.baseline_step_timing)

    @property
    def noise(self) -> float | None:
        """The uncertainty of `overhead`; where it is larger than `overhead`, the machine was too busy."""
        if self.step_timing is None or self.baseline_step_timing is None:
            return None
        return self.step_timing.noise_beside(self.baseline_step_timing)

    @property
    def notes(self) -> tuple[str, ...]:
        """Where a prediction is off by more than a percent, and by which op; where the two measured peaks
        disagree, and why; where page faults are a good part of the time; where eager differs from itself."""
        rows = (
            (
                "without the plan",
                self.baseline_predicted_peak_bytes,
                self.baseline_measured_peak_bytes,
                self.baseline_resident_peak_bytes,
                self.baseline_peak_op,
            ),
            (
                "with the plan",
                self.predicted_peak_bytes,
                self.measured_peak_bytes,
                self.resident_peak_bytes,
                self.peak_op,
            ),
        )
        notes = [
            prediction_note(which, predicted=predicted, measured=measured, op=op)
            for which, predicted, measured, _, op in rows
        ]
        notes += agreement_notes([(which, measured, resident) for which, _, measured, resident, _ in rows])
        notes.append(fault_note(self.baseline_step_timing, self.step_timing))
        notes.insert(0, nondeterminism_note(self))
        if self.from_eager:
            notes.insert(0, f"compared with the compiled step without recompute, which is {self.from_eager}")
        return tuple(filter(None, notes))

    def summary(self) -> str:
        """Whether the plan fits and is exact, and unreliable measurements, in a few lines."""
        return "\n".join(verdict(self))

    def report(self, path: str | Path) -> Path:
        """Write a page with what was measured, and the plan's timelines and decisions; returns its path."""
        assert self.plan is not None, "a verification is of a plan"
        return write_report(path, self.plan, title="Verified plan", measurement=measurement_of(self))

    def _repr_html_(self) -> str:
        before, after = timelines(self.plan) if self.plan is not None else (None, None)
        picture = timeline_svg(after, other=before, budget_bytes=self.budget_bytes) if after else ""
        return card(repr(self), [("", line) for line in verdict(self)], picture)

    @property
    def fits(self) -> bool:
        """Whether the measured peak is within the budget: of live bytes, or of reserved ones."""
        if self.reserved_budget_bytes is not None and self.measured_reserved_bytes is not None:
            return self.measured_reserved_bytes <= self.reserved_budget_bytes
        return self.measured_peak_bytes <= self.budget_bytes


@stage("verify", given=lambda source, plan, **_: repr(plan), made=repr)
def verify(
    source: Target | TargetSpec, plan: Plan, *, timed_runs: int | None = None, resident: bool = True
) -> Verification:
    """Compare and measure in fresh processes; in this process for a live model that cannot be pickled.

    `timed_runs` None: eager and planned steps are timed in turn until the noise is small, or half a minute is
    spent. Without `resident`, peaks are torch's own count.
    """
    payload = {"solution": solution_to_dict(plan.solution)}
    timed: dict[str, Any] = {"timed_runs": timed_runs, "most_seconds": MOST_SECONDS}
    if isinstance(source, Target):
        check_identity(plan, identify(source.model, split_batch(source.batch)))
    try:
        comparison: Comparison = run_fresh(
            "lowtide.verification.comparison:compare", source=source, **timed, **payload
        )
        baseline = measure_step(
            source, prepare="lowtide.verification.comparison:looped", payload=payload, resident=resident
        )
        planned = measure_plan(source, plan, resident=resident)
    except CannotMoveToFreshProcess:
        if isinstance(source, TargetSpec):
            raise
        comparison, baseline, planned = _verify_here(source, payload["solution"], timed)
    except FreshProcessError as error:
        if error.kind == PlanMismatch.__name__:
            raise PlanMismatch(str(error)) from error
        raise
    reserved = plan.solution.reserved
    return Verification(
        exact=not comparison.differences and comparison.rounding is None,
        differences=comparison.differences,
        recompute_exact=comparison.recompute_exact,
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        measured_peak_bytes=planned.peak_bytes,
        resident_peak_bytes=planned.resident_peak_bytes,
        baseline_predicted_peak_bytes=plan.baseline_peak_bytes,
        baseline_measured_peak_bytes=baseline.peak_bytes,
        baseline_resident_peak_bytes=baseline.resident_peak_bytes,
        step_timing=comparison.timings.get("planned"),
        baseline_step_timing=comparison.timings.get("eager"),
        fresh_process=planned.fresh_process,
        from_eager=comparison.from_eager,
        peak_op=planned.peak_op,
        baseline_peak_op=baseline.peak_op,
        eager_differences=comparison.eager_differences,
        nondeterministic_ops=comparison.nondeterministic_ops,
        deterministic_with=comparison.deterministic_with,
        reserved_budget_bytes=plan.reserved_budget_bytes,
        predicted_reserved_bytes=plan.reserved_bytes,
        measured_reserved_bytes=planned.reserved_peak_bytes,
        baseline_predicted_reserved_bytes=reserved.baseline_bytes if reserved else None,
        baseline_measured_reserved_bytes=baseline.reserved_peak_bytes,
        plan=plan,
        rounding=comparison.rounding,
    )


def measure_plan(
    source: Target | TargetSpec, plan: Plan, *, timed_runs: int | None = 0, resident: bool = True
) -> Measured:
    """Measure the planned step alone, in fresh processes: the baseline may be too large for this machine."""
    payload = {"solution": solution_to_dict(plan.solution)}
    return measure_step(
        source,
        prepare="lowtide.verification.comparison:planned",
        payload=payload,
        timed_runs=timed_runs,
        resident=resident,
    )


def _verify_here(
    source: Target, solution: dict[str, Any], timed: dict[str, Any]
) -> tuple[Comparison, Measured, Measured]:
    """The same in this process, on a copy, for models that cannot be pickled."""
    with generators_kept(devices_of(source.model, source.batch)):
        model, batch, optimizer = copy.deepcopy((source.model, source.batch, source.optimizer))
        copied = replace(source, model=model, batch=batch, optimizer=optimizer)
        comparison = compare(source=copied, solution=solution, **timed)
        remove(model)
        baseline = measure_here(copied, prepare=lambda t: looped(t, solution=solution))
        return comparison, baseline, measure_here(copied, prepare=lambda t: planned(t, solution=solution))
