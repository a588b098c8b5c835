"""`lowtide tradeoff`: the curve of peak memory against time added."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from lowtide.cli.command import OutputOptions, command
from lowtide.cli.exit_codes import Exit
from lowtide.cli.option_values import several
from lowtide.cli.options import OptionalBatchSize, Planners, Source, TimedRuns
from lowtide.cli.sources import StepOptions, offers, open_source
from lowtide.cli.terminal import Terminal, table
from lowtide.errors import TargetError
from lowtide.experiments.machine import why_not
from lowtide.facts.gpus import gpu_behind
from lowtide.report.answer import free_text
from lowtide.report.style import HOW_TIMED, added, duration, percent, size

if TYPE_CHECKING:
    from pathlib import Path

    from lowtide.experiments.measured import Curve
    from lowtide.plans import Plan
    from lowtide.profiles import Profile
    from lowtide.report.results import BudgetPoint, PlannerCurve, TradeoffPoint

CSV, JSON, PLANNERS_CSV = "tradeoff.csv", "tradeoff.json", "planners.csv"
MAX_ROWS = 20
MEASURED_COLUMNS = ("measured>", "time>")


@command
def tradeoff(
    terminal: Terminal,
    source: Source,
    *,
    points: Annotated[
        int, typer.Option(metavar="N", min=1, help="Budgets to plan for, evenly spaced in bytes.")
    ] = 50,
    measure: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Plans of the curve to measure in fresh processes; 0 for none."
        ),
    ] = 3,
    planners: Planners = None,
    timed_runs: TimedRuns = 5,
    batch_size: OptionalBatchSize = None,
    step: Annotated[StepOptions, offers("offload", "device")],
    output: OutputOptions,
) -> None:
    """Show what every budget costs: peak memory against recompute time, from no recompute to the floor.

    A few plans of the curve are measured in fresh processes, in turn with eager, unless --measure 0, or
    the step is too large for this machine, or is one on a GPU that is not here (--device), where all is
    estimated; from a profile.json nothing else needs torch. With --planners the curves of several planners
    over the same budgets, and the bound that no plan is below. With -o writes tradeoff.csv, tradeoff.json,
    plots and a report; with --planners also planners.csv and the plot pareto. Exits with 4 when a measured
    plan's results differ, with 1 when measuring one failed.
    """
    from lowtide.cli.output_files import PLOTS, REPORT, say_written
    from lowtide.experiments.measured import Curve, curves_of, measure_points, point_of
    from lowtide.experiments.planner_curves import budget_points, curve_of, measured_curves, planner_curves

    out = output.claim(CSV, JSON, REPORT, PLOTS, *((PLANNERS_CSV,) if planners else ()))
    profile, spec, name = open_source(source, terminal, step, batch_size=batch_size)
    if gpu_behind(profile.step.device) is not None:
        measure = 0  # that device is absent
    names = several(planners)
    if measure and spec is None:
        raise TargetError(f"'{source}' does not say what it is a profile of: say --measure 0")
    with terminal.working("planning"):
        plans, without_offload = curves_of(profile, points=points)
    side: dict[str, list[Plan | None]] = {}
    if names:
        with terminal.counting(f"planning with {len(names)} planners") as progress:
            side = planner_curves(profile, names, points=points, progress=progress)
    curves = [curve_of(each, made) for each, made in side.items()]
    curve = Curve([point_of(plan) for plan in plans])
    reason = why_not(profile.step, peak_bytes=profile.peak_bytes) if measure else ""
    if reason:
        terminal.note(f"no plan is measured: the step without one {reason}")
    elif measure and spec is not None:
        with terminal.counting(f"measuring {measure} plans") as progress:
            if side:
                found = dict(
                    measured_curves(spec, side, count=measure, timed_runs=timed_runs, progress=progress)
                )
                curve.wrong = [text for each in found.values() for text in each.wrong]
                curve.failed = [text for each in found.values() for text in each.failed]
                curves = [curve_of(each, side[each], curve=found.get(each)) for each in side]
            else:
                curve = measure_points(spec, plans, count=measure, timed_runs=timed_runs, progress=progress)
    data = _data(profile, curve, without_offload, name=name)
    rows = budget_points(profile, side, points=points) if side else []
    if side:
        data["planners"] = [asdict(each) for each in curves]
        data["budgets"] = [asdict(row) | {"overheads": dict(row.overheads)} for row in rows]
    if out is not None:
        with terminal.working("writing the report"):
            measured = not source.endswith(".json") or any(p.measured_peak_bytes for p in curve.points)
            _write(out, profile, curve, without_offload, data, curves=curves, measured=measured)
    terminal.data(data)
    terminal.show(*(_planner_tables(rows, curves, data) if rows else _tables(data)))
    if free := free_text(curve.points, profile.step_seconds, baseline_bytes=profile.peak_bytes):
        terminal.show(Text(free))
    say_written(terminal, out, CSV, JSON, *((PLANNERS_CSV,) if side else ()))
    failed = Exit.ERROR if curve.failed else Exit.DONE
    raise typer.Exit(Exit.RESULTS_DIFFER if curve.wrong else failed)


def _data(
    profile: "Profile", curve: "Curve", without_offload: "list[TradeoffPoint]", *, name: str
) -> dict[str, Any]:
    seconds = profile.step_seconds

    def point_data(point: "TradeoffPoint") -> dict[str, Any]:
        return asdict(point) | {"overhead": point.recompute_seconds / seconds if seconds else None}

    return {
        "target": name,
        "device": profile.step.device,
        "baseline_peak_bytes": profile.peak_bytes,
        "floor_bytes": profile.floor_bytes,
        "step_seconds": seconds,
        "differences": curve.wrong,
        "failures": curve.failed,
        "points": [point_data(point) for point in curve.points],
        **({"without_swap": [point_data(point) for point in without_offload]} if without_offload else {}),
    }


def _tables(data: dict[str, Any]) -> list[RenderableType]:
    """About twenty rows of the curve, every measured point included; measured figures replace a column."""
    points, baseline = data["points"], data["baseline_peak_bytes"]
    stride = max(1, -(-len(points) // MAX_ROWS))
    shown = [
        point
        for index, point in enumerate(points)
        if index % stride == 0 or index == len(points) - 1 or point["measured_peak_bytes"] is not None
    ]
    measured = any(point["measured_peak_bytes"] is not None for point in points)
    rows = [
        (
            size(point["peak_bytes"]),
            percent(point["peak_bytes"] / baseline - 1),
            *(() if measured else (duration(point["recompute_seconds"]),)),
            percent(point["overhead"]),
            _at_least(point, data["step_seconds"]),
            len(point["recomputed"]),
            *(_measured(point) if measured else ()),
        )
        for point in shown
    ]
    columns = (
        "peak>",
        "memory>",
        *(() if measured else ("recompute>",)),
        "time>",
        "at least>",
        "tensors>",
        *(MEASURED_COLUMNS if measured else ()),
    )
    title = f"{data['target']}: peak against time added"
    left = len(points) - len(shown)
    return [
        table(title, columns, rows),
        *([Text(HOW_TIMED)] if measured else []),
        *([Text(f"{left} more points are in {CSV} (-o DIR) and in --json")] if left else []),
        *(Text(f"results DIFFER: {text}") for text in data["differences"]),
        *(Text(f"not measured: {text}") for text in data["failures"]),
    ]


def _planner_tables(
    rows: "list[BudgetPoint]", curves: "list[PlannerCurve]", data: dict[str, Any]
) -> list[RenderableType]:
    """What each planner adds at about twenty of the budgets, and the measured points of all."""
    stride = max(1, -(-len(rows) // MAX_ROWS))
    shown = [row for index, row in enumerate(rows) if index % stride == 0 or index == len(rows) - 1]
    columns = ("budget>", *(f"{name}>" for name, _ in rows[0].overheads), "no plan below>")
    cells = [
        (size(row.budget_bytes), *(percent(share) for _, share in row.overheads), percent(row.bound))
        for row in shown
    ]
    measured = [
        (curve.planner, size(point.peak_bytes), *_measured(asdict(point)))
        for curve in curves
        for point in curve.points
        if point.measured_peak_bytes is not None
    ]
    return [
        table(f"{data['target']}: time added by planner (simulated)", columns, cells),
        *([table("Measured", ("planner", "predicted>", *MEASURED_COLUMNS), measured)] if measured else []),
        *([Text(HOW_TIMED)] if measured else []),
        *(Text(f"results DIFFER: {text}") for text in data["differences"]),
        *(Text(f"not measured: {text}") for text in data["failures"]),
    ]


def _at_least(point: dict[str, Any], step_seconds: float) -> str:
    bound = point["lower_bound_seconds"]
    return percent(bound / step_seconds if bound is not None and step_seconds else None)


def _measured(point: dict[str, Any]) -> tuple[str, str]:
    if point["measured_peak_bytes"] is None:
        return "", ""
    return size(point["measured_peak_bytes"]), added(point["measured_overhead"], point["measured_noise"])


def _write(
    out: "Path",
    profile: "Profile",
    curve: "Curve",
    without_offload: "list[TradeoffPoint]",
    data: dict[str, Any],
    *,
    curves: "list[PlannerCurve]",
    measured: bool,
) -> None:
    from lowtide.cli.output_files import environment, write_experiment
    from lowtide.report.exports import write_planner_curves, write_tradeoff

    step, shown = profile.step, {"tradeoff": curve.points, "without_offload": without_offload}
    if curves:
        write_planner_curves(
            out / PLANNERS_CSV, curves, step_seconds=profile.step_seconds, device=step.device
        )
    write_tradeoff(out / CSV, curve.points, step_seconds=profile.step_seconds, device=step.device)
    write_experiment(
        out / JSON,
        data,
        plots={
            **shown,
            "step_seconds": profile.step_seconds,
            "planners": curves,
            "name": data["target"],
        },
        title=f"{data['target']}: trade-off",
        environment=environment(step.device, measured=measured),
        step=step,
        before=profile.timeline,
        activations=profile.activations,
        **shown,
    )
