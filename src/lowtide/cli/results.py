"""What a verification tells: as data for `--json` and as a table."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from lowtide.cli.exits import Exit
from lowtide.cli.output import table
from lowtide.report.records import relative_increase
from lowtide.report.words import UNKNOWN, duration, percent, size

if TYPE_CHECKING:
    from lowtide.verification import Verification

MAX_DIFFERENCES = 5


def verification_data(result: "Verification", *, name: str) -> dict[str, Any]:
    return {"target": name, "fits": result.fits, "overhead": result.overhead, **asdict(result)}


def verification_tables(result: "Verification", *, name: str) -> list[RenderableType]:
    """Two rows, without and with the plan, and the verdict in words."""
    rows = [
        (
            "without",
            size(result.baseline_predicted_peak_bytes),
            size(result.baseline_measured_peak_bytes),
            size(result.baseline_resident_peak_bytes),
            "",
            _timing(result.baseline_step_timing),
            "",
        ),
        (
            "with",
            size(result.predicted_peak_bytes),
            size(result.measured_peak_bytes),
            size(result.resident_peak_bytes),
            percent(relative_increase(result.baseline_measured_peak_bytes, result.measured_peak_bytes)),
            _timing(result.step_timing),
            percent(result.overhead),
        ),
    ]
    columns = ("plan", "predicted peak>", "measured peak>", "resident peak>", "memory>", "step>", "time>")
    return [table(f"{name}, verified", columns, rows), *(Text(line) for line in verdict(result))]


def verdict(result: "Verification") -> list[str]:
    """The answer in a few lines: does it fit, is it exact, and what was not measured as it should be."""
    over = "at or below" if result.fits else "ABOVE"
    lines = [f"peak: {size(result.measured_peak_bytes)}, {over} the budget of {size(result.budget_bytes)}"]
    if result.exact:
        lines.append("results: equal to the last bit")
    else:
        count = len(result.differences)
        lines.append(f"results: DIFFERENT in {count} places")
        lines += [f"  {difference}" for difference in result.differences[:MAX_DIFFERENCES]]
    if result.eager_difference:
        lines.append(
            "note: the model takes another path of its own code while it is captured, plan or no plan; "
            f"eager first differs at {result.eager_difference}"
        )
    if not result.fresh_process:
        lines.append("note: measured in this process, since the model cannot be sent to a fresh one")
    return lines


def verification_exit(result: "Verification") -> Exit:
    """Wrong results are worse than too much memory."""
    if not result.exact:
        return Exit.RESULTS_DIFFER
    return Exit.DONE if result.fits else Exit.DOES_NOT_FIT


def _timing(timing: Any) -> str:
    if timing is None:
        return UNKNOWN
    return f"{duration(timing.median_seconds)} ± {duration(timing.spread_seconds / 2)}"
