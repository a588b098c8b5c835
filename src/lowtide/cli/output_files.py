"""The files that commands write and read.

`profile.json` and `plan.json` go from one command to the next, each with its target. Commands print the next
command to type. Experiments write JSON, plots and a report; `lowtide run` writes everything.
"""

import logging
import shlex
import sys
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.cli.tables import outcome_data
from lowtide.cli.terminal import Terminal
from lowtide.errors import BudgetTooSmall, LowtideError
from lowtide.facts.files import write_atomic
from lowtide.facts.gpus import ESTIMATED, gpu_behind
from lowtide.facts.serial import (
    load_json,
    save_json,
    solution_from_dict,
    solution_to_dict,
    step_from_dict,
    step_to_dict,
)
from lowtide.facts.sizes import parse_budget
from lowtide.planning.activations import activations
from lowtide.planning.schedules import eager_timeline
from lowtide.planning.simulate import simulate
from lowtide.plans import Plan
from lowtide.profiles import Profile
from lowtide.report.exports import write_trace, write_tradeoff, write_transfers
from lowtide.report.html import render_report
from lowtide.report.results import Environment, environment_here
from lowtide.report.times import store_use
from lowtide.units import format_size, round_up_size
from lowtide.zoo.targets import TargetSpec

if TYPE_CHECKING:
    from lowtide.experiments.measured import Outcome

PROFILE = "profile.json"
PLAN = "plan.json"
NODES = "node_stats.csv"
ACTIVATIONS = "activation_stats.csv"
DECISIONS = "ac_decisions.csv"
VERIFICATION = "verification.json"
TARGET = "target"


def save_profile(path: Path, profile: Profile, spec: TargetSpec | None) -> None:
    save_json(path, step_to_dict(profile.one_call) | _target(spec))


def load_profile(path: Path) -> tuple[Profile, TargetSpec | None]:
    data = load_json(path)
    return Profile.of(step_from_dict(data, path=path)), _spec(path, data)


def save_plan(path: Path, plan: Plan, spec: TargetSpec | None) -> None:
    save_json(path, solution_to_dict(plan.solution) | _target(spec))


def load_plan(path: Path) -> tuple[Plan, TargetSpec | None]:
    data = load_json(path)
    return Plan(solution_from_dict(data, path=path)), _spec(path, data)


def _target(spec: TargetSpec | None) -> dict[str, Any]:
    return {} if spec is None else {TARGET: asdict(spec)}


def _spec(path: Path, data: dict[str, Any]) -> TargetSpec | None:
    if TARGET not in data:
        return None
    try:
        return TargetSpec(**data[TARGET])
    except TypeError as error:
        raise LowtideError(f"'{path}' names a target that cannot be read: make the file again") from error


USUAL = "60%"


def budget_to_try(*, peak_bytes: int, floor_bytes: int) -> str:
    """A budget that can be met: the usual share of the peak, else the floor, rounded up."""
    reachable = floor_bytes <= parse_budget(USUAL, whole=peak_bytes)
    return USUAL if reachable else round_up_size(floor_bytes)


def plan_command(out: Path, *, budget: str, planner: str = "auto") -> str:
    """How to plan from the profile in `out`."""
    where, file = (shlex.quote(str(path)) for path in (out, out / PROFILE))
    other = "" if planner == "auto" else f" --planner {planner}"
    return f"lowtide plan {file} --budget {shlex.quote(budget)}{other} -o {where}"


def after_run(
    out: Path, *, floor_bytes: int, step_in_backward: bool = False, executor: str = "eager"
) -> list[str]:
    """The next commands after `lowtide run`; a profile in a file is planned for executor 'eager'."""
    floor = "the lowest reachable peak" if executor == "eager" else "the lowest peak with executor 'eager'"
    given = "model, optimizer=optimizer" if step_in_backward else "model"
    profile, plan = (shlex.quote(str(out / name)) for name in (PROFILE, PLAN))
    return [
        f"lowtide plan {profile} --budget {floor_bytes}   # {floor}, at once",
        f"lowtide tradeoff {profile} --measure 0   # what every budget costs",
        f"lowtide verify {plan}   # again",
        f"model = lowtide.load_plan({str(out / PLAN)!r}).apply({given})   # in your own script",
    ]


REPORT = "report.html"
PLOTS = "plots"

logger = logging.getLogger("lowtide")


def plots_if_possible(folder: Path, **data: Any) -> list[Path]:
    """The plots that `data` allows, in their own folder; without matplotlib none, and a line on stderr."""
    if find_spec("matplotlib") is None:
        logger.warning("no plots: they need matplotlib (pip install lowtide[plots])")
        return []
    from lowtide.report.plots import write_plots

    return write_plots(folder / PLOTS, **data)


def write_experiment(path: Path, data: Any, *, plots: dict[str, Any], **page: Any) -> list[Path]:
    """`data` as JSON at `path`, beside it the `plots` that can be drawn, and the report of `page`. The report
    is written last: where it exists, all files exist."""
    save_json(path, data)
    pictures = plots_if_possible(path.parent, **plots) if plots else []
    return [path, *pictures, write_atomic(path.parent / REPORT, render_report(**page))]


def say_written(terminal: Terminal, folder: Path | None, *names: str) -> None:
    if folder is not None:
        terminal.note(f"wrote {', '.join(str(folder / name) for name in names)}")
        terminal.note(f"report: {folder / REPORT}")


def environment(device: str, *, measured: bool = True) -> Environment:
    """The environment of this command's figures; torch is imported only for measured ones."""
    known = measured or gpu_behind(device) is not None
    here = _device(device) if known else "planned from a file, nothing measured"
    return environment_here(machine=here, command=f"lowtide {shlex.join(sys.argv[1:])}")


def _device(name: str) -> str:
    gpu = gpu_behind(name)
    if gpu is not None:
        return f"{gpu.words}, {ESTIMATED}: nothing was measured"
    import torch

    from lowtide.profiling.devices import device_for

    return device_for(torch.device(name)).identity


TRACE = "trace.json"
TRADEOFF = "tradeoff.csv"
TRANSFERS = "transfers.csv"
FILES = (
    *(PROFILE, NODES, ACTIVATIONS, PLAN, DECISIONS, VERIFICATION),
    *(TRANSFERS, TRADEOFF, TRACE, REPORT, PLOTS),
)
CURVE_POINTS = 30


def write_profile(folder: Path, *, spec: TargetSpec, profile: Profile) -> list[Path]:
    """The files that are known before planning, to continue from after a failure."""
    save_profile(folder / PROFILE, profile, spec)
    return [folder / PROFILE, *profile.to_csv(folder)]


def write_plan(folder: Path, *, spec: TargetSpec | None, plan: Plan) -> list[Path]:
    """The files that are known before any run."""
    save_plan(folder / PLAN, plan, spec)
    return [folder / PLAN, *plan.to_csv(folder)]


def write_refusal(folder: Path, *, profile: Profile, name: str, refusal: BudgetTooSmall) -> list[Path]:
    """The report of a step for which no plan fits: what would."""
    page = render_report(
        title=f"{name}: no plan fits {format_size(refusal.budget_bytes)}",
        refusal=refusal,
        environment=environment(profile.step.device),
        step=profile.step,
        before=profile.timeline,
        activations=profile.activations,
    )
    return [write_atomic(folder / REPORT, page)]


def write_results(folder: Path, *, profile: Profile, plan: Plan, outcome: "Outcome", name: str) -> list[Path]:
    """All other files, the report last."""
    from lowtide.experiments.measured import curves_of, point_of

    step, before = profile.step, profile.timeline
    if plan.rounds and plan.step is not None:  # other ops, which the pictures show both times
        step, before = plan.step, eager_timeline(plan.step)
    after = simulate(step, plan.solution.schedule.runs)
    plans, without_offload = curves_of(profile, points=CURVE_POINTS)
    curve = [point_of(plan) for plan in plans]
    files = [
        write_tradeoff(
            folder / TRADEOFF, curve, step_seconds=profile.step_seconds, device=profile.step.device
        ),
        write_trace(folder / TRACE, step, {"without": before, "with": after}),
    ]
    if (use := store_use(step, after)) is not None:
        files.append(write_transfers(folder / TRANSFERS, use, device=step.device))
    shown = {
        "step": step,
        "before": before,
        "after": after,
        "activations": activations(step) if plan.rounds else profile.activations,
        "tradeoff": curve,
        "without_offload": without_offload,
    }
    return files + write_experiment(
        folder / VERIFICATION,
        outcome_data(outcome, name=name, device=step.device),
        plots={**shown, "budget_bytes": plan.budget_bytes, "name": name},
        title=name,
        environment=environment(step.device),
        # the curve has searched for the floor, for any planner
        solution=replace(plan.solution, floor_bytes=profile.floor_bytes),
        measurement=outcome.measurement,
        plan_file=str(folder / PLAN),
        **shown,
    )
