"""`lowtide compare`: other ways to save memory next to lowtide's."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from lowtide.cli.command import OutputOptions, command
from lowtide.cli.exit_codes import Exit, UsageError
from lowtide.cli.option_values import live_budgets, several
from lowtide.cli.options import BatchSize, Executor, ExecutorName, Planners, TargetText, TimedRuns
from lowtide.cli.sources import StepOptions, offers, on_device, profile_target, title_of
from lowtide.cli.terminal import Terminal, table
from lowtide.facts.sizes import step_budget
from lowtide.report.results import CompareRow, PlannerCurve, Results
from lowtide.report.style import UNKNOWN, is_noisy, percent, size

if TYPE_CHECKING:
    from lowtide.experiments.compare_methods import MethodResult

Budgets = Annotated[
    str | None,
    typer.Option(
        metavar="SIZES",
        help="Budgets of the planners, with commas between them: 8GiB, or 60%,50% of the baseline's peak. "
        "Without it: the peaks that other methods reach.",
        callback=live_budgets,
        show_default=False,
    ),
]
CSV, JSON = "compare.csv", "compare.json"
MORE = CompareRow(method="(more methods)", verdict=Results.PENDING)
CURVE_POINTS = 20
NOTHING: Mapping[str, Any] = MappingProxyType({})
HOW_RATED = (
    "Time is the method's median over eager's, runs in turn; a ± marks times too noisy to tell, "
    "± ? those of fewer than three runs or of a busy machine."
)


@command
def compare(
    terminal: Terminal,
    target: TargetText,
    *,
    batch_size: BatchSize,
    step: Annotated[StepOptions, offers()],
    executor: Executor = ExecutorName.EAGER,
    memory_budgets: Annotated[
        str | None,
        typer.Option(
            metavar="SHARES",
            help="Shares of the saved bytes that PyTorch's partitioner may keep: 0.5,0.",
            show_default=False,
        ),
    ] = None,
    planners: Planners = None,
    budget: Budgets = None,
    timed_runs: TimedRuns = 5,
    output: OutputOptions,
) -> None:
    """Measure other ways to save memory next to lowtide's: peak, time, and whether results are exact.

    None, torch.utils.checkpoint around every repeated block, PyTorch's partitioner at memory budgets
    from 0.9 to 0, and then mu-two and auto at the peaks that these reach. Each runs in a fresh process,
    timed in turn with eager. With --executor inductor also torch.compile, alone and with memory budgets, and
    auto on Inductor; large models compile for minutes in each of these rows, and --memory-budgets 0.5,0 takes
    fewer of them.

    With --planners and --budget, planners alone: each at these budgets, beside eager, and the bound that no
    plan is below. Planners of your own are those of the entry point group lowtide.planners.

    With -o writes compare.csv, compare.json, plots and a report. Exits with 4 when results of lowtide's own
    differ, with 3 when one of its plans is above its budget.
    """
    from lowtide.cli.output_files import REPORT, say_written
    from lowtide.experiments import compare_methods as experiment
    from lowtide.experiments.machine import why_busy
    from lowtide.experiments.planner_curves import curve_of, planner_curves
    from lowtide.runtime.executor import executor_named

    executor_named(executor)
    shares = experiment.MEMORY_BUDGETS if memory_budgets is None else _shares(memory_budgets)
    names = several(planners, experiment.PLANNERS)
    out = output.claim(CSV, JSON, REPORT)
    spec = step.spec(target, batch_size)
    profile = profile_target(spec, terminal, step)
    device = profile.step.device
    name = on_device(title_of(spec), device)
    found: list[MethodResult] = []
    budgets = [step_budget(each, whole=profile.peak_bytes) for each in several(budget)]
    curves: list[PlannerCurve] = []
    if planners is not None:
        with terminal.counting(f"planning with {len(names)} planners") as progress:
            side = planner_curves(profile, names, points=CURVE_POINTS, progress=progress)
        curves = [curve_of(each, made) for each, made in side.items()]
    if reason := why_busy():
        terminal.note(f"warning: {reason}: times say little")
    results = experiment.compare(
        spec,
        profile,
        executor=executor,
        timed_runs=timed_runs,
        memory_budgets=shares,
        planners=names,
        budgets=budgets,
        with_rivals=planners is None or not budgets,
        working=terminal.working,
    )
    for result in results:
        found.append(replace(result, noise=None) if reason else result)
        terminal.note(f"{result.method}: {result.verdict_text}")
        if out is not None:
            _write(out, found, finished=False, name=name, device=device)
    more: dict[str, Any] = {"busy": reason} if reason else {}
    if curves:
        more["planners"] = [asdict(curve) for curve in curves]
    terminal.data(compare_data(found, finished=True, name=name, device=device) | more)
    terminal.show(*compare_tables(found, name=name))
    if out is not None:
        pareto = {"planners": curves, "budgets": budgets, "step_seconds": profile.step_seconds}
        plots = pareto if curves else {}
        _write(out, found, finished=True, name=name, device=device, more=more, plots=plots)
        say_written(terminal, out, CSV, JSON)
    raise typer.Exit(compare_exit(found))


def _shares(text: str) -> tuple[float, ...]:
    """`0.5,0` as numbers from 0 to 1, the highest first."""
    try:
        shares = tuple(sorted({float(part) for part in text.split(",")}, reverse=True))
    except ValueError:
        shares = ()
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise UsageError(f"cannot read the memory budgets '{text}': write shares from 0 to 1, such as 0.5,0")
    return shares


def compare_exit(found: "Sequence[MethodResult]") -> Exit:
    """The worst outcome of lowtide's own plans: wrong results, then a crash, then too much memory."""
    plans = [result for result in found if result.kind == "plan"]
    ran = [result for result in plans if result.peak_bytes is not None]
    if any(not result.exact for result in ran):
        return Exit.RESULTS_DIFFER
    if any(result.verdict is Results.CRASHED for result in plans):
        return Exit.ERROR
    above = [r for r in ran if r.budget_bytes is not None and (r.peak_bytes or 0) > r.budget_bytes]
    return Exit.DOES_NOT_FIT if above else Exit.DONE


def compare_data(
    found: "Sequence[MethodResult]", *, finished: bool, name: str, device: str
) -> dict[str, Any]:
    from lowtide.experiments.compare_methods import result_to_dict

    methods = [result_to_dict(result) for result in found]
    return {"target": name, "device": device, "finished": finished, "methods": methods}


def compare_tables(found: "Sequence[MethodResult]", *, name: str) -> list[RenderableType]:
    bounded = any(result.predicted_bound is not None for result in found)
    baseline = next((result.peak_bytes for result in found if result.kind == "eager"), None)
    rows = [
        (
            result.method,
            size(result.peak_bytes),
            percent(result.peak_bytes / baseline - 1) if baseline and result.peak_bytes else UNKNOWN,
            _time(result),
            *((percent(result.predicted_bound),) if bounded else ()),
            result.verdict_text,
        )
        for result in found
    ]
    columns = (
        "method",
        "peak>",
        "memory>",
        "time>",
        *(("no plan below>",) if bounded else ()),
        "results",
    )
    wrong = [result for result in found if result.first_difference]
    return [
        table(f"{name}: methods, measured", columns, rows),
        Text(HOW_RATED),
        *(Text(f"{result.method}: first at {result.first_difference}") for result in wrong),
    ]


def _time(result: "MethodResult") -> str:
    """The time over eager's; nothing to claim where the noise is unknown."""
    if result.time_ratio is None:
        return UNKNOWN
    text = f"× {result.time_ratio:.2f}"
    if result.kind == "eager":
        return text
    if result.noise is None:
        return f"{text} ± ?"
    return f"{text} ± {result.noise:.2f}" if is_noisy(result.time_ratio - 1, result.noise) else text


def _write(
    out: Path,
    found: "Sequence[MethodResult]",
    *,
    finished: bool,
    name: str,
    device: str,
    more: Mapping[str, Any] = NOTHING,
    plots: Mapping[str, Any] = NOTHING,
) -> None:
    """Write all files for the methods so far; they say whether more follow."""
    from lowtide.cli.output_files import environment, write_experiment
    from lowtide.report.exports import write_compare

    rows = list(found)
    write_compare(out / CSV, rows if finished else [*rows, MORE], device=device)
    write_experiment(
        out / JSON,
        compare_data(found, finished=finished, name=name, device=device) | dict(more),
        plots={"compare": rows, "name": name, **plots} if finished else {},
        title=f"{name}: methods",
        environment=environment(device),
        compare=rows,
        unfinished="" if finished else "more methods were to follow",
    )
