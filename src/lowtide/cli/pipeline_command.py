"""`lowtide plan TARGET --pipeline 4 --microbatches 8`: a plan for each stage of a pipeline."""

from typing import Any

import typer
from rich.console import RenderableType
from rich.text import Text

from lowtide.cli.exit_codes import Exit, UsageError
from lowtide.cli.sources import StepOptions
from lowtide.cli.terminal import Terminal, table
from lowtide.errors import BudgetTooSmall
from lowtide.report.style import size

ALLOWED = (
    "--device",
    "--image-size",
    "--sequence-length",
    "--optimizer",
    "--seed",
    "--memory-limit",
    "--no-cache",
)
SCHEDULE = (
    "1F1B; each stage on a process of its own, with --optimizer (adam). In flight: micro-batches that wait "
    "for their backward pass. Peaks are predicted, and nothing was trained"
)


def pipeline_command(
    terminal: Terminal,
    source: str,
    *,
    stages: int | None,
    microbatches: int | None,
    batch_size: int | None,
    budget: str,
    step: StepOptions,
    others: tuple[str, ...],
) -> None:
    """Plan the stages, show them, and exit with 3 where one does not fit. `others`: more options that were
    given."""
    _check(source, stages=stages, microbatches=microbatches, given=(*step.given, *others))
    assert stages is not None and microbatches is not None
    rows = _plans(
        terminal,
        source,
        stages=stages,
        microbatches=microbatches,
        batch_size=batch_size,
        budget=budget,
        step=step,
    )
    terminal.data({"target": source, "stages": rows, "microbatches": microbatches, "schedule": "1F1B"})
    terminal.show(*_tables(rows, source, microbatches=microbatches))
    raise typer.Exit(Exit.DONE if all(row["fits"] for row in rows) else Exit.DOES_NOT_FIT)


def _check(source: str, *, stages: int | None, microbatches: int | None, given: tuple[str, ...]) -> None:
    if stages is None:
        raise UsageError("--microbatches is for a pipeline of how many stages? Say --pipeline N")
    if stages < 2:
        raise UsageError(f"--pipeline {stages}: a pipeline has 2 stages or more")
    if microbatches is None:
        raise UsageError(
            f"how many micro-batches has a step of this pipeline? Say --microbatches N, as in {2 * stages}"
        )
    if source.endswith(".json"):
        raise UsageError(
            f"'{source}' is profiled whole, and a pipeline needs its stages: give a TARGET instead"
        )
    refused = [name for name in given if name not in ALLOWED]
    if refused:
        raise UsageError(f"{refused[0]} is not planned for a pipeline: leave {refused[0]} or --pipeline out")


def _plans(
    terminal: Terminal,
    source: str,
    *,
    stages: int,
    microbatches: int,
    batch_size: int | None,
    budget: str,
    step: StepOptions,
) -> list[dict[str, Any]]:
    if batch_size is None:
        raise UsageError(
            f"how many samples in a step of the pipeline? Say --batch-size N, as in -b {microbatches}"
        )
    samples, left = divmod(batch_size, microbatches)
    if left or not samples:
        raise UsageError(
            f"a batch of {batch_size} cannot be divided into {microbatches} micro-batches: give a "
            f"multiple, such as -b {microbatches * max(1, samples)}"
        )
    from lowtide.experiments.pipeline_stages import profile_stages
    from lowtide.zoo.build import make_optimizer

    target = step.spec(source, samples).load()
    rows: list[dict[str, Any]] = []
    with terminal.counting(f"profiling {stages} stages") as progress:
        for index, stage in enumerate(
            profile_stages(
                target,
                stages=stages,
                microbatches=microbatches,
                optimizer=lambda module: make_optimizer(step.optimizer or "adam", module),
                progress=progress,
                device=step.device,
                memory_limit=step.memory_limit,
                cache=not step.no_cache,
            )
        ):
            row: dict[str, Any] = {
                "stage": index,
                "blocks": [stage.first, stage.last],
                "in_flight": stage.in_flight,
                "baseline_peak_bytes": stage.profile.peak_bytes,
                "floor_bytes": stage.profile.floor_bytes,
            }
            try:
                plan = stage.profile.plan(budget)
            except BudgetTooSmall:
                rows.append({**row, "fits": False})
            else:
                rows.append({**row, "fits": True, "peak_bytes": plan.peak_bytes, "overhead": plan.overhead})
    return rows


def _tables(rows: list[dict[str, Any]], source: str, *, microbatches: int) -> list[RenderableType]:
    blocks = rows[0]["blocks"][0].rpartition(".")[0]
    title = f"{source}, {len(rows)} stages of {blocks or 'its blocks'}, {microbatches} micro-batches"
    columns = ("stage>", "blocks", "in flight>", "without a plan>", "floor>", "peak>", "time>")
    return [table(title, columns, [_line(row) for row in rows]), Text(SCHEDULE)]


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    first, last = (name.rpartition(".")[2] for name in row["blocks"])
    return (
        str(row["stage"]),
        first if first == last else f"{first} to {last}",
        str(row["in_flight"]),
        size(row["baseline_peak_bytes"]),
        size(row["floor_bytes"]),
        size(row["peak_bytes"]) if row["fits"] else "does not fit",
        f"{row['overhead']:+.1%}" if row["fits"] else "",
    )
