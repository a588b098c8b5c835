"""A plan run for real, as far as this machine's memory goes, as the records that reports show.

Profile a step by running it whole, where the machine can hold it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from lowtide.analyze.captured_step import capture
from lowtide.experiments.machine_memory import check_memory, why_not
from lowtide.facts.sizes import parse_size
from lowtide.planning.simulate import eager_runs, walked
from lowtide.plans import Plan
from lowtide.profiles import Profile
from lowtide.profiling.costing import MEMORY_LIMIT_BYTES
from lowtide.profiling.whole_run import run_costs
from lowtide.report.results import Measurement, StepMeasurement
from lowtide.trace.identity import user_tensors
from lowtide.verification import verify_plan
from lowtide.verification.measure_step import measure_step
from lowtide.verification.verdict import measurement_of, step_measurement
from lowtide.verification.verify_plan import Verification
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
        result = verify_plan.verify(spec, plan, timed_runs=timed_runs, resident=resident)
        return Outcome(measurement=measurement_of(result), verification=result)
    predicted = Measurement(
        baseline=StepMeasurement(predicted_peak_bytes=plan.baseline_peak_bytes),
        planned=StepMeasurement(predicted_peak_bytes=plan.peak_bytes),
    )
    if why_not(plan.solution, peak_bytes=plan.peak_bytes):
        return Outcome(measurement=predicted, reason=reason)
    found = verify_plan.measure_plan(spec, plan, timed_runs=timed_runs, resident=resident)
    alone = step_measurement(predicted=plan.peak_bytes, measured=found.peak_bytes, timing=found.timing)
    method = "torch's count of bytes, a fresh process; the step without the plan does not fit here"
    return Outcome(
        measurement=Measurement(baseline=predicted.baseline, planned=alone, method=method), reason=reason
    )


def run_plain(spec: TargetSpec | Target, *, predicted: int, timed_runs: int) -> StepMeasurement:
    """The step without any plan, in fresh processes, its peak by torch's own count."""
    found = measure_step(spec, timed_runs=timed_runs, resident=False)
    return step_measurement(predicted=predicted, measured=found.peak_bytes, timing=found.timing)


def profile_by_running(
    target: Target,
    *,
    memory_limit: str | int = MEMORY_LIMIT_BYTES,
    cache: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Seconds and bytes of every node from real runs of the captured graphs; arguments as in
    `lowtide.profile`.

    NotEnoughMemory, before anything is run, where this machine cannot hold the step.
    """
    captured = capture(target.model, target.batch, optimizer=target.optimizer, loss=target.loss)
    peak_bytes = walked(captured.step, eager_runs(captured.step)).peak_bytes
    check_memory(captured.step, peak_bytes=peak_bytes, what="running the step whole (--mode run)")
    tensors = user_tensors(target.model, target.batch)
    limit_bytes = parse_size(memory_limit)
    return Profile(
        *run_costs(captured, tensors, memory_limit_bytes=limit_bytes, use_cache=cache, progress=progress)
    )
