"""The page of `bench/levers.py`: Markdown from its CSV file."""

import csv
from datetime import date
from pathlib import Path

from lowtide.cli.output_files import environment

Row = dict[str, str]

HEADS = (
    "levers",
    "at",
    "peak, MiB",
    "of eager's peak",
    "set by",
    "time added",
    "predicted",
    "offloaded, MiB",
    "transfers, s",
    "hidden",
    "waited, s",
    "exact",
)


def render_page(path: Path, *, picture: str = "") -> str:
    """One table for each target of the file, in its order, and a picture of what every budget costs."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    where = environment("cpu")
    versions = ", ".join(f"{name} {version}" for name, version in where.versions)
    parts = [
        f"# Levers below the floor, {date.today()}",
        f"Machine: {where.machine}. Versions: {versions}. Command: `python bench/levers.py "
        f"{' '.join(_targets(rows))}`.",
        "The lowest peak that each lever reaches, with all those above it; where `at` names a share of "
        "eager's peak, the fastest plan within it. Adam. Peaks are measured in fresh processes, "
        "by torch's own count, and their share is of eager's, measured too; `~` marks what was "
        "predicted and not run. Times are of few pairs of steps, run in turn. Waiting for the store: "
        "measured, and predicted in brackets.",
    ]
    for target in _targets(rows):
        own = [row for row in rows if row["target"] == target]
        eager = next((row["measured_eager_mib"] for row in own if row["measured_eager_mib"]), "")
        parts += [f"## {target}", f"Eager: {eager or '~' + own[0]['eager_mib']} MiB.", _table(own)]
    if picture:
        parts += ["## With and without the store", f"![What every budget costs]({picture})"]
    return "\n\n".join(parts) + "\n"


def _targets(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["target"] for row in rows))


def _table(rows: list[Row]) -> str:
    lines = [HEADS, ["---"] * len(HEADS), *map(_cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: Row) -> list[str]:
    if not row["percent_of_eager"]:  # a share that cannot be reached
        return [row["levers"], row["at"], row["peak_mib"], "", f"`{row['set_by']}`", *[""] * 7]
    measured, eager = row["measured_mib"], row["measured_eager_mib"]
    share = f"{100 * float(measured) / float(eager):.1f} %" if measured else f"~{row['percent_of_eager']} %"
    waited = row["measured_waited_seconds"]
    return [
        row["levers"],
        row["at"],
        measured or f"~{row['peak_mib']}",
        share,
        f"`{row['set_by']}`",
        _percent(row["measured_overhead_percent"]),
        _percent(row["predicted_overhead_percent"]),
        row["swapped_mib"],
        row["transfer_seconds"],
        f"{row['hidden_percent']} %" if row["hidden_percent"] else "",
        f"{waited} ({row['waited_seconds']})" if waited else "",
        row["exact"],
    ]


def _percent(number: str) -> str:
    return f"{float(number):+.1f} %" if number else ""
