"""Everything that `lowtide run` leaves in its folder."""

from pathlib import Path

from lowtide.cli.files import (
    ACTIVATIONS,
    DECISIONS,
    NODES,
    PLAN,
    PROFILE,
    VERIFICATION,
    save_plan,
    save_profile,
)
from lowtide.cli.pages import PLOTS, REPORT, environment, plots_if_possible
from lowtide.cli.results import verification_data
from lowtide.experiments.curve import distinct_plans, point_of
from lowtide.experiments.measured import measurement_of
from lowtide.files import write_atomic
from lowtide.plans import Plan
from lowtide.profiles import Profile
from lowtide.report.csvs import write_tradeoff
from lowtide.report.html import render_report
from lowtide.report.trace import write_trace
from lowtide.serial import save_json
from lowtide.simulate import simulate
from lowtide.targets import TargetSpec
from lowtide.verification import Verification

TRACE = "trace.json"
TRADEOFF = "tradeoff.csv"
FILES = (PROFILE, NODES, ACTIVATIONS, PLAN, DECISIONS, VERIFICATION, TRADEOFF, TRACE, REPORT, PLOTS)
CURVE_POINTS = 30


def write_bundle(
    folder: Path, *, spec: TargetSpec, profile: Profile, plan: Plan, result: Verification, name: str
) -> list[Path]:
    """Write all files; the report comes last, so that its being there means that all are."""
    step, before = profile.step, profile.timeline
    after = simulate(step, plan.solution.schedule.order)
    curve = [point_of(plan) for plan in distinct_plans(profile.tradeoff(points=CURVE_POINTS))]
    save_profile(folder / PROFILE, profile, spec)
    save_plan(folder / PLAN, plan, spec)
    save_json(folder / VERIFICATION, verification_data(result, name=name))
    files = [folder / PROFILE, folder / PLAN, folder / VERIFICATION]
    files += profile.to_csv(folder) + plan.to_csv(folder)
    files.append(write_tradeoff(folder / TRADEOFF, curve, step_seconds=profile.step_seconds))
    files.append(write_trace(folder / TRACE, step, {"without": before, "with": after}))
    files += plots_if_possible(
        folder,
        step=step,
        before=before,
        after=after,
        activations=profile.activations,
        budget_bytes=plan.budget_bytes,
        tradeoff=curve,
    )
    page = render_report(
        title=name,
        environment=environment(step.device),
        step=step,
        before=before,
        after=after,
        solution=plan.solution,
        activations=profile.activations,
        measurement=measurement_of(result),
        tradeoff=curve,
    )
    files.append(write_atomic(folder / REPORT, page))
    return files
