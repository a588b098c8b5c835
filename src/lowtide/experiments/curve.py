"""The curve of peak against recompute time, with some of its plans measured for real."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lowtide.errors import FreshProcessError
from lowtide.facts import Action
from lowtide.plans import Plan
from lowtide.profiles import Profile
from lowtide.report.results import Results, TradeoffPoint, with_why
from lowtide.report.style import size
from lowtide.zoo.targets import TargetSpec


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
    """The plans of a profile's curve; and the curve without its store, empty where it has none."""
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
    """The points of a curve; what was not exact among the measured ones, and what failed, in words."""

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
