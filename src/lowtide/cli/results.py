"""What a verification tells: as data for `--json` and as a table."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from lowtide.checking.verdict import kept, verdict
from lowtide.cli.exits import Exit
from lowtide.cli.output import table
from lowtide.report.records import relative_increase
from lowtide.report.words import (
    HOW_TIMED,
    UNKNOWN,
    added,
    duration,
    percent,
    size,
)

if TYPE_CHECKING:
    from lowtide.checking.verification import Verification
    from lowtide.experiments.measured import Outcome


def outcome_data(outcome: "Outcome", *, name: str) -> dict[str, Any]:
    result = outcome.verification
    if result is None:
        return {"target": name, "not_compared": outcome.reason, **asdict(outcome.measurement)}
    figures = {"fits": result.fits, "overhead": result.overhead, "noise": result.noise}
    return {"target": name, **figures, **asdict(replace(result, plan=None)), "notes": list(result.notes)}


def outcome_tables(outcome: "Outcome", *, budget_bytes: int, name: str) -> list[RenderableType]:
    """What was measured without and with the plan, and the verdict in words."""
    if outcome.verification is not None:
        return verification_tables(outcome.verification, name=name)
    planned = outcome.measurement.planned
    lines = [f"{name}: the step without the plan {outcome.reason}"]
    if planned.measured_peak_bytes is None:
        lines.append("nothing was run, since the planned step does not fit into this machine either")
    else:
        lines.append(f"with the plan: {kept(planned.measured_peak_bytes, budget_bytes)}")
        lines.append(f"step: {duration(planned.seconds_median)}")
        lines.append("results: not compared")
    return [Text(line) for line in lines]


def outcome_exit(outcome: "Outcome", *, budget_bytes: int) -> Exit:
    """Wrong results are worse than too much memory."""
    peak_bytes = outcome.measurement.planned.measured_peak_bytes
    if outcome.measurement.exact is False:
        return Exit.RESULTS_DIFFER
    return Exit.DONE if peak_bytes is not None and peak_bytes <= budget_bytes else Exit.DOES_NOT_FIT


def verification_tables(result: "Verification", *, name: str) -> list[RenderableType]:
    """Two rows in each table, without and with the plan, and the verdict in words."""
    peaks = [
        (
            "without",
            size(result.baseline_predicted_peak_bytes),
            size(result.baseline_measured_peak_bytes),
            size(result.baseline_resident_peak_bytes),
            "",
        ),
        (
            "with",
            size(result.predicted_peak_bytes),
            size(result.measured_peak_bytes),
            size(result.resident_peak_bytes),
            percent(relative_increase(result.baseline_measured_peak_bytes, result.measured_peak_bytes)),
        ),
    ]
    times = [
        ("without", _timing(result.baseline_step_timing), ""),
        ("with", _timing(result.step_timing), added(result.overhead, result.noise)),
    ]
    columns = ("plan", "predicted peak>", "measured peak>", "resident peak>", "memory>")
    tables: list[RenderableType] = [table(f"{name}, peak memory", columns, peaks)]
    if result.step_timing is not None:
        tables.append(table(f"{name}, step time", ("plan", "step>", "time>"), times))
        tables.append(Text(HOW_TIMED))
    return [*tables, *(Text(line) for line in verdict(result))]


def _timing(timing: Any) -> str:
    if timing is None:
        return UNKNOWN
    return f"{duration(timing.median_seconds)} ± {duration(timing.spread_seconds / 2)}"
