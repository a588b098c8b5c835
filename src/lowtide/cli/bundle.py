"""Everything that `lowtide run` leaves in its folder."""

import datetime
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

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
from lowtide.cli.results import measurement_of, verification_data
from lowtide.facts import Action
from lowtide.files import write_atomic
from lowtide.plans import Plan
from lowtide.profiles import Profile
from lowtide.profiling.device import device_for
from lowtide.report.csvs import write_tradeoff
from lowtide.report.html import render_report
from lowtide.report.plots import write_plots
from lowtide.report.records import Environment, TradeoffPoint
from lowtide.report.trace import write_trace
from lowtide.serial import save_json
from lowtide.simulate import simulate
from lowtide.targets import TargetSpec
from lowtide.verification import Verification

REPORT = "report.html"
TRACE = "trace.json"
TRADEOFF = "tradeoff.csv"
PLOTS = "plots"
FILES = (PROFILE, NODES, ACTIVATIONS, PLAN, DECISIONS, VERIFICATION, TRADEOFF, TRACE, REPORT, PLOTS)
CURVE_POINTS = 30


def write_bundle(
    folder: Path, *, spec: TargetSpec, profile: Profile, plan: Plan, result: Verification, name: str
) -> list[Path]:
    """Write all files; the report comes last, so that its being there means that all are."""
    step, before = profile.step, profile.timeline
    after = simulate(step, plan.solution.schedule.order)
    curve = curve_points(profile.tradeoff(points=CURVE_POINTS))
    save_profile(folder / PROFILE, profile, spec)
    save_plan(folder / PLAN, plan, spec)
    save_json(folder / VERIFICATION, verification_data(result, name=name))
    files = [folder / PROFILE, folder / PLAN, folder / VERIFICATION]
    files += profile.to_csv(folder) + plan.to_csv(folder)
    files.append(write_tradeoff(folder / TRADEOFF, curve, step_seconds=profile.step_seconds))
    files.append(write_trace(folder / TRACE, step, {"without": before, "with": after}))
    files += write_plots(
        folder / PLOTS,
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


def curve_points(plans: Sequence[Plan]) -> list[TradeoffPoint]:
    """The curve's points; plans that are the same for several budgets once."""
    points = [
        TradeoffPoint(
            peak_bytes=plan.peak_bytes,
            recompute_seconds=plan.recompute_seconds,
            recomputed=tuple(d.name for d in plan.decisions if d.action is Action.RECOMPUTE),
        )
        for plan in plans
    ]
    return list(dict.fromkeys(points))


def environment(device: str) -> Environment:
    """How this command's figures were measured."""
    return Environment(
        command=f"lowtide {shlex.join(sys.argv[1:])}",
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        machine=f"{device_for(torch.device(device)).identity}, {platform.system()} {platform.machine()}",
        versions=(("python", platform.python_version()), *_versions("lowtide", "torch", "transformers")),
    )


def _versions(*names: str) -> list[tuple[str, str]]:
    found = []
    for name in names:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue  # an optional library that is not here took no part
    return found
