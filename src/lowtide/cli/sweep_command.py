"""`lowtide sweep`: peak and latency against batch size, without and with a plan."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from lowtide.cli.command import OutputOptions, command
from lowtide.cli.exit_codes import Exit
from lowtide.cli.options import LiveBudget, Planner, TargetText, TimedRuns
from lowtide.cli.sources import StepOptions, offers, on_device, profile_target
from lowtide.cli.terminal import Terminal, table
from lowtide.errors import LowtideError
from lowtide.report.results import Results, StepMeasurement, SweepRow, SweepStatus
from lowtide.report.style import HOW_TIMED, UNKNOWN, added, duration, percent, size
from lowtide.zoo.targets import TargetSpec, check_target

if TYPE_CHECKING:
    from lowtide.profiles import Profile

CSV, JSON = "sweep.csv", "sweep.json"


def batch_sizes_of(text: str) -> list[int]:
    """`4,8,16` as numbers, each once, in the order given."""
    try:
        sizes = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise typer.BadParameter(f"cannot read the batch sizes '{text}': write them as 4,8,16")
    return list(dict.fromkeys(sizes))


def _readable(text: str) -> str:
    batch_sizes_of(text)
    return text


@command
def sweep(
    terminal: Terminal,
    target: TargetText,
    *,
    batch_sizes: Annotated[
        str,
        typer.Option(
            "--batch-sizes",
            "-b",
            metavar="N,N,...",
            help="Batch sizes.",
            show_default=False,
            callback=_readable,
        ),
    ],
    budget: LiveBudget,
    planner: Planner = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep what an earlier sweep into the same folder measured.")
    ] = False,
    predict: Annotated[bool, typer.Option("--predict", help="Predict only: run no step.")] = False,
    step: Annotated[StepOptions, offers()],
    timed_runs: TimedRuns = 5,
    output: OutputOptions,
) -> None:
    """Show peak and latency against batch size, without and with a plan, measured in fresh processes.

    A budget in bytes is the same for every size, a share is of each size's own peak. Where only
    the planned step fits into this machine's memory it is measured alone, where neither does both are
    predicted. A size that fails does not end the sweep. With
    -o writes sweep.csv, sweep.json, two plots and a report, anew after every size.
    """
    from lowtide.cli.output_files import PLOTS, REPORT, say_written
    from lowtide.experiments.sweep_rows import sweep as run_sweep

    sizes = batch_sizes_of(batch_sizes)
    spec = step.spec(target, sizes[0])
    settings = _settings(spec, budget=budget, planner=planner, timed_runs=timed_runs)
    if resume and output.folder is None:
        raise LowtideError("--resume needs the folder of the earlier sweep: say -o DIR")
    check_target(target)
    done = earlier_rows(output.folder / JSON, settings) if resume and output.folder is not None else []
    out = output.claim(*(() if resume else (CSV, JSON, REPORT, PLOTS)))
    rows: list[SweepRow] = []
    devices = [step.on or "cpu"]

    def profile(one: TargetSpec) -> "Profile":
        found = profile_target(one, terminal, step)
        devices.append(found.step.device)
        return found

    waiting = {row.batch_size: row for row in done}
    for row in run_sweep(
        spec,
        batch_sizes=sizes,
        budget=budget,
        planner=planner,
        timed_runs=timed_runs,
        measure=not predict,
        done=done,
        profile=profile,
        working=terminal.working,
        tell=terminal.note,
    ):
        rows.append(row)
        again = "taken from before" if waiting.pop(row.batch_size, None) else row.status_text
        terminal.note(f"batch {row.batch_size}: {again} ({len(rows)} of {len(sizes)})")
        if out is not None:
            # with rows of an earlier sweep that this one has not reached, or that were not asked for
            known = [*rows, *waiting.values()]
            pending = [n for n in sizes[len(rows) :] if n not in waiting]
            name = on_device(target, devices[-1])
            _write(out, known, settings, pending=pending, name=name, device=devices[-1])
    terminal.data(_data(rows, settings, finished=True, device=devices[-1]))
    terminal.show(*sweep_tables(rows, name=on_device(target, devices[-1])))
    say_written(terminal, out, CSV, JSON)
    raise typer.Exit(sweep_exit(rows))


def _settings(spec: TargetSpec, **options: Any) -> dict[str, Any]:
    """The settings that rows of an earlier sweep must share with new rows."""
    target = {key: value for key, value in asdict(spec).items() if key != "batch_size"}
    return {"target": target, **options}


def earlier_rows(path: Path, settings: dict[str, Any]) -> list[SweepRow]:
    """The final rows of an earlier sweep with the same settings, if any."""
    from lowtide.experiments.sweep_rows import is_final, row_from_dict
    from lowtide.facts.serial import load_json

    if not path.exists():
        return []
    data = load_json(path)
    if data.get("settings") != settings:
        raise LowtideError(
            f"{path} is of a sweep with another target, budget or other settings: leave --resume out, or "
            "choose another -o"
        )
    rows = []
    for row in data["rows"]:
        with suppress(LowtideError):  # rows of another version: their sizes are run again
            rows.append(row_from_dict(row))
    return [row for row in rows if is_final(row)]


def sweep_tables(rows: Sequence[SweepRow], *, name: str) -> list[RenderableType]:
    peaks = [
        (
            row.batch_size,
            size(row.budget_bytes),
            _peak(row.baseline),
            _peak(row.planned),
            percent(None if row.reduction is None else -row.reduction),
            percent(row.predicted_overhead),
            _status(row),
        )
        for row in rows
    ]
    times = [
        (row.batch_size, _time(row.baseline), _time(row.planned), added(row.overhead, row.noise))
        for row in rows
        if row.planned.seconds_median is not None or row.baseline.seconds_median is not None
    ]
    columns = ("batch>", "budget>", "baseline peak>", "planned peak>", "memory>", "recompute>", "results")
    tables: list[RenderableType] = [table(f"{name}: peak memory", columns, peaks)]
    if any(_is_predicted(row) for row in rows):
        tables.append(Text("~ predicted, not measured\n"))
    if times:
        tables.append(table(f"{name}: step time", ("batch>", "baseline>", "planned>", "time>"), times))
        tables.append(Text(HOW_TIMED))
    return tables


def _is_predicted(row: SweepRow) -> bool:
    steps = (row.baseline, row.planned)
    return any(step.measured_peak_bytes is None and step.predicted_peak_bytes is not None for step in steps)


def _peak(step: StepMeasurement) -> str:
    if step.measured_peak_bytes is not None:
        return size(step.measured_peak_bytes)
    return UNKNOWN if step.predicted_peak_bytes is None else f"~{size(step.predicted_peak_bytes)}"


def _time(step: StepMeasurement) -> str:
    if step.seconds_median is None:
        return UNKNOWN
    return f"{duration(step.seconds_median)} ± {duration((step.seconds_spread or 0.0) / 2)}"


def _status(row: SweepRow) -> str:
    if row.exact is None:
        return row.status_text
    if not row.exact:
        return Results.UNLIKE_EAGER if row.recompute_exact else "DIFFERENT"
    return "exact, ABOVE the budget" if _is_above(row) else "exact"


def _is_above(row: SweepRow) -> bool:
    measured = row.planned.measured_peak_bytes
    return measured is not None and row.budget_bytes is not None and measured > row.budget_bytes


def sweep_exit(rows: Sequence[SweepRow]) -> Exit:
    """Wrong results are worse than too much memory; sizes that do not fit are an error only if all do not."""
    if any(row.exact is False for row in rows):
        return Exit.RESULTS_DIFFER
    if all(row.status is SweepStatus.FAILED for row in rows):
        return Exit.ERROR
    if any(_is_above(row) for row in rows):
        return Exit.DOES_NOT_FIT
    fits = any(row.planned.predicted_peak_bytes is not None for row in rows)
    return Exit.DONE if fits else Exit.DOES_NOT_FIT


def _data(
    rows: Sequence[SweepRow], settings: dict[str, Any], *, finished: bool, device: str
) -> dict[str, Any]:
    from lowtide.experiments.sweep_rows import row_to_dict

    found = [row_to_dict(row) for row in rows]
    return {"settings": settings, "device": device, "finished": finished, "rows": found}


def _write(
    out: Path,
    rows: Sequence[SweepRow],
    settings: dict[str, Any],
    *,
    pending: Sequence[int],
    name: str,
    device: str,
) -> None:
    """Write all files for the sizes so far; they say which sizes are `pending`."""
    from lowtide.cli.output_files import environment, write_experiment
    from lowtide.report.exports import write_sweep

    write_sweep(out / CSV, [*rows, *(_pending(batch_size) for batch_size in pending)], device=device)
    write_experiment(
        out / JSON,
        _data(rows, settings, finished=not pending, device=device),
        plots={"sweep": rows, "name": name},
        title=f"{name}: batch sizes",
        environment=environment(device),
        sweep=rows,
        unfinished=f"batch sizes {', '.join(map(str, pending))} are missing" if pending else "",
    )


def _pending(batch_size: int) -> SweepRow:
    nothing = StepMeasurement()
    return SweepRow(
        batch_size=batch_size,
        budget_bytes=None,
        baseline=nothing,
        planned=nothing,
        status=SweepStatus.PENDING,
    )
