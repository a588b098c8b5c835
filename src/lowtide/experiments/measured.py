"""Real runs of steps and plans, where this machine has the memory.

`run_plan`: one plan; `measure_points`: points of a trade-off curve; `profile_by_running`: a profile.
Functions that run a model import torch themselves: the curve of a stored profile does not need it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lowtide.errors import FreshProcessError
from lowtide.experiments.machine import check_memory, why_not
from lowtide.facts import Action
from lowtide.facts.sizes import parse_size
from lowtide.planning.simulate import eager_runs, simulate_unchecked
from lowtide.plans import Plan
from lowtide.profiles import Profile
from lowtide.report.results import Measurement, Results, StepMeasurement, TradeoffPoint, with_why
from lowtide.report.style import size
from lowtide.zoo.targets import Target, TargetSpec

if TYPE_CHECKING:
    from lowtide.verification.verify_plan import Verification


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of running a plan. Where the baseline does not fit into the machine, `verification` is None
    and `reason` says so; the planned step is then measured alone, or not at all.
    """

    measurement: Measurement
    verification: "Verification | None" = None
    reason: str = ""


def run_plan(
    spec: TargetSpec | Target, plan: Plan, *, timed_runs: int | None, resident: bool = True
) -> Outcome:
    """Verify a plan against eager; where only the planned step fits into this machine, measure it alone.

    Without `resident`, peaks are torch's own count.
    """
    from lowtide.verification import verify_plan
    from lowtide.verification.verdict import measurement_of, step_measurement

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
    from lowtide.verification.measure_step import measure_step
    from lowtide.verification.verdict import step_measurement

    found = measure_step(spec, timed_runs=timed_runs, resident=False)
    return step_measurement(predicted=predicted, measured=found.peak_bytes, timing=found.timing)


def profile_by_running(
    target: Target,
    *,
    memory_limit: str | int = "1GiB",
    cache: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Seconds and bytes of every node from real runs of the captured graphs; arguments as in
    `lowtide.profile`.

    NotEnoughMemory, before any run, where the step does not fit into this machine.
    """
    from lowtide.analyze.captured_step import capture
    from lowtide.profiling.whole_run import run_costs
    from lowtide.trace.identity import user_tensors

    captured = capture(target.model, target.batch, optimizer=target.optimizer, loss=target.loss)
    peak_bytes = simulate_unchecked(captured.step, eager_runs(captured.step)).peak_bytes
    check_memory(captured.step, peak_bytes=peak_bytes, what="running the step whole (--mode run)")
    tensors = user_tensors(target.model, target.batch)
    limit_bytes = parse_size(memory_limit)
    return Profile(
        *run_costs(captured, tensors, memory_limit_bytes=limit_bytes, use_cache=cache, progress=progress)
    )


def distinct_plans(plans: Sequence[Plan]) -> list[Plan]:
    """The plans of a curve by falling peak; budgets that gave the same plan give one."""
    found = {(plan.peak_bytes, plan.recompute_seconds): plan for plan in reversed(plans)}
    return sorted(found.values(), key=lambda plan: (-plan.peak_bytes, plan.recompute_seconds))


def point_of(plan: Plan) -> TradeoffPoint:
    return TradeoffPoint(
        peak_bytes=plan.peak_bytes,
        recompute_seconds=plan.recompute_seconds,
        recomputed=tuple(d.name for d in plan.decisions if d.action is Action.RECOMPUTE),
        offloaded=tuple(d.name for d in plan.decisions if d.action is Action.OFFLOAD),
        lower_bound_seconds=plan.lower_bound_seconds,
    )


def curves_of(profile: Profile, *, points: int) -> tuple[list[Plan], list[TradeoffPoint]]:
    """The plans of a profile's curve; and the curve without offload, empty where the profile has none."""
    plans = distinct_plans(profile.tradeoff(points=points))
    if profile.step.transfer_speed is None:
        return plans, []
    return plans, [point_of(plan) for plan in distinct_plans(profile.tradeoff(points=points, offload=False))]


def spread_over(count: int, total: int) -> list[int]:
    """`count` of the indices below `total`, evenly spread, the last one always among them."""
    wanted = min(count, total)
    return sorted(total - 1 - total * i // wanted for i in range(wanted))


@dataclass(slots=True)
class Curve:
    """The points of a curve; texts about measured points that were not exact, and about failed ones."""

    points: list[TradeoffPoint]
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def measure_points(
    source: TargetSpec,
    plans: Sequence[Plan],
    *,
    count: int,
    timed_runs: int,
    progress: Callable[[int, int], None],
) -> Curve:
    """The curve with measured peak and time added for `count` of its points.

    Each is measured in a fresh process, in turn with eager.
    """
    from lowtide.experiments.contenders import plan_method
    from lowtide.experiments.trial import try_method

    curve = Curve([point_of(plan) for plan in plans])
    chosen = spread_over(count, len(plans))
    for done, index in enumerate(chosen):
        progress(done, len(chosen))
        name = f"plan of {size(plans[index].peak_bytes)}"
        try:
            trial = try_method(source, plan_method(name, plans[index]), timed_runs=timed_runs)
        except FreshProcessError as error:
            curve.failed.append(f"{name}: {error}")
            continue
        curve.points[index] = replace(
            curve.points[index],
            measured_peak_bytes=trial.peak_bytes,
            measured_overhead=trial.overhead,
            measured_noise=trial.noise,
        )
        verdict, why = trial.judgement
        if verdict is not Results.EXACT:
            curve.wrong.append(f"{name}: {with_why(verdict, why)}")
    progress(len(chosen), len(chosen))
    return curve
