"""The trade-off curves of several planners over the same budgets, beside the proven bound."""

from collections.abc import Callable, Iterator, Sequence

from lowtide.errors import BudgetTooSmall
from lowtide.experiments.measured import Curve, distinct_plans, measure_points, point_of
from lowtide.plans import Plan
from lowtide.profiles import Profile
from lowtide.report.results import BudgetPoint, PlannerCurve
from lowtide.zoo.targets import TargetSpec


def budgets_between(profile: Profile, *, points: int) -> list[int]:
    """Budgets from the baseline's peak down to the floor, evenly spaced."""
    high, low = profile.peak_bytes, profile.floor_bytes
    return [high - (high - low) * i // max(1, points - 1) for i in range(points)]


def planner_curves(
    profile: Profile,
    planners: Sequence[str],
    *,
    points: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> "dict[str, list[Plan | None]]":
    """By planner, its plan for each of the budgets; None where the planner finds none within."""
    budgets = budgets_between(profile, points=points)
    found: dict[str, list[Plan | None]] = {}
    for name in planners:
        found[name] = []
        for budget_bytes in budgets:
            progress(sum(map(len, found.values())), len(planners) * len(budgets))
            found[name].append(_planned(profile, budget_bytes, name))
    return found


def _planned(profile: Profile, budget_bytes: int, planner: str) -> Plan | None:
    try:
        return profile.plan(budget_bytes, planner)
    except BudgetTooSmall:
        return None


def curve_of(name: str, plans: "Sequence[Plan | None]", *, curve: Curve | None = None) -> PlannerCurve:
    """A planner's curve: its plans by falling peak, or the measured points of these."""
    made = distinct_plans([plan for plan in plans if plan is not None])
    points = tuple(point_of(plan) for plan in made) if curve is None else tuple(curve.points)
    return PlannerCurve(planner=name, points=points)


def measured_curves(
    source: TargetSpec,
    plans: "dict[str, list[Plan | None]]",
    *,
    count: int,
    timed_runs: int,
    progress: Callable[[int, int], None],
) -> Iterator[tuple[str, Curve]]:
    """By planner, its curve with `count` measured points."""
    for done, (name, found) in enumerate(plans.items()):

        def counted(part: int, parts: int, done: int = done) -> None:
            progress(done * parts + part, len(plans) * parts)

        made = distinct_plans([plan for plan in found if plan is not None])
        if made:
            curve = measure_points(source, made, count=count, timed_runs=timed_runs, progress=counted)
            curve.wrong = [f"{name}: {text}" for text in curve.wrong]
            curve.failed = [f"{name}: {text}" for text in curve.failed]
            yield name, curve


def budget_points(
    profile: Profile, plans: "dict[str, list[Plan | None]]", *, points: int
) -> list[BudgetPoint]:
    """For each budget, what every planner adds there, and what no plan can be below."""
    seconds = profile.step_seconds
    rows = []
    for number, budget_bytes in enumerate(budgets_between(profile, points=points)):
        made = {name: found[number] for name, found in plans.items()}
        bounds = [plan.lower_bound_seconds for plan in made.values() if plan is not None]
        known = [bound for bound in bounds if bound is not None]
        rows.append(
            BudgetPoint(
                budget_bytes=budget_bytes,
                overheads=tuple(
                    (name, None if plan is None else plan.overhead) for name, plan in made.items()
                ),
                bound=max(known) / seconds if known and seconds else None,
            )
        )
    return rows
