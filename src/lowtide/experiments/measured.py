"""A plan run for real, as far as this machine's memory goes, as the records that reports show."""

from dataclasses import dataclass

from lowtide.checking import verification
from lowtide.checking.measure import measure_step
from lowtide.checking.records import measurement_of, step_measurement
from lowtide.checking.verification import Verification
from lowtide.experiments.machine import why_not
from lowtide.plans import Plan
from lowtide.report.records import Measurement, StepMeasurement
from lowtide.zoo.targets import Target, TargetSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What running a plan found out. `verification` is None where the machine cannot hold the step without
    the plan, and `reason` says so; the planned step is then measured alone, or not at all.
    """

    measurement: Measurement
    verification: Verification | None = None
    reason: str = ""


def run_plan(spec: TargetSpec | Target, plan: Plan, *, timed_runs: int, resident: bool = True) -> Outcome:
    """Verify a plan against eager, measure it alone, or do neither, by what fits into this machine.

    Without `resident`, peaks are measured by torch's own count alone.
    """
    reason = why_not(plan.solution, peak_bytes=plan.baseline_peak_bytes)
    if not reason:
        result = verification.verify(spec, plan, timed_runs=timed_runs, resident=resident)
        return Outcome(measurement=measurement_of(result), verification=result)
    predicted = Measurement(
        baseline=StepMeasurement(predicted_peak_bytes=plan.baseline_peak_bytes),
        planned=StepMeasurement(predicted_peak_bytes=plan.peak_bytes),
    )
    if why_not(plan.solution, peak_bytes=plan.peak_bytes):
        return Outcome(measurement=predicted, reason=reason)
    found = verification.measure_plan(spec, plan, timed_runs=timed_runs, resident=resident)
    alone = step_measurement(predicted=plan.peak_bytes, measured=found.peak_bytes, timing=found.timing)
    method = "torch's count of bytes, a fresh process; the step without the plan does not fit here"
    return Outcome(
        measurement=Measurement(baseline=predicted.baseline, planned=alone, method=method), reason=reason
    )


def run_plain(spec: TargetSpec | Target, *, predicted: int, timed_runs: int) -> StepMeasurement:
    """The step without any plan, in fresh processes, its peak by torch's own count."""
    found = measure_step(spec, timed_runs=timed_runs, resident=False)
    return step_measurement(predicted=predicted, measured=found.peak_bytes, timing=found.timing)
