"""Everything that `lowtide run` leaves in its folder."""

from dataclasses import replace
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
from lowtide.cli.results import outcome_data
from lowtide.experiments.curve import curves_of, point_of
from lowtide.experiments.measured import Outcome
from lowtide.facts.files import write_atomic
from lowtide.facts.serial import save_json
from lowtide.planning.simulate import simulate
from lowtide.plans import Plan
from lowtide.profiles import Profile
from lowtide.report.csvs import write_tradeoff, write_transfers
from lowtide.report.html import render_report
from lowtide.report.trace import write_trace
from lowtide.report.traffic import store_use
from lowtide.zoo.targets import TargetSpec

TRACE = "trace.json"
TRADEOFF = "tradeoff.csv"
TRANSFERS = "transfers.csv"
FILES = (
    *(PROFILE, NODES, ACTIVATIONS, PLAN, DECISIONS, VERIFICATION),
    *(TRANSFERS, TRADEOFF, TRACE, REPORT, PLOTS),
)
CURVE_POINTS = 30


def write_profile(folder: Path, *, spec: TargetSpec, profile: Profile) -> list[Path]:
    """What is known before anything is planned, to go on from should that fail."""
    save_profile(folder / PROFILE, profile, spec)
    return [folder / PROFILE, *profile.to_csv(folder)]


def write_plan(folder: Path, *, spec: TargetSpec, plan: Plan) -> list[Path]:
    """What is known before anything is run."""
    save_plan(folder / PLAN, plan, spec)
    return [folder / PLAN, *plan.to_csv(folder)]


def write_results(folder: Path, *, profile: Profile, plan: Plan, outcome: Outcome, name: str) -> list[Path]:
    """All other files; the report comes last, so that its being there means that all are."""
    step, before = profile.step, profile.timeline
    after = simulate(step, plan.solution.schedule.runs)
    plans, without_swap = curves_of(profile, points=CURVE_POINTS)
    curve = [point_of(plan) for plan in plans]
    save_json(folder / VERIFICATION, outcome_data(outcome, name=name))
    files = [folder / VERIFICATION]
    files.append(
        write_tradeoff(
            folder / TRADEOFF, curve, step_seconds=profile.step_seconds, device=profile.step.device
        )
    )
    use = store_use(step, after)
    if use is not None:
        files.append(write_transfers(folder / TRANSFERS, use, device=profile.step.device))
    files.append(write_trace(folder / TRACE, step, {"without": before, "with": after}))
    files += plots_if_possible(
        folder,
        step=step,
        before=before,
        after=after,
        activations=profile.activations,
        budget_bytes=plan.budget_bytes,
        tradeoff=curve,
        without_swap=without_swap,
        name=name,
    )
    page = render_report(
        title=name,
        environment=environment(step.device),
        step=step,
        before=before,
        after=after,
        # the curve above searched for it, whatever planner made the plan
        solution=replace(plan.solution, floor_bytes=profile.floor_bytes),
        activations=profile.activations,
        measurement=outcome.measurement,
        tradeoff=curve,
        without_swap=without_swap,
    )
    files.append(write_atomic(folder / REPORT, page))
    return files
