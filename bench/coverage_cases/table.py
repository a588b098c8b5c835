"""The coverage table for people: totals, causes, and every case that is not exact."""

import re
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from rows import markdown_table

from .outcome import GOOD, OUTCOMES, Outcome

GROUPS = ("architecture", "construction", "loop")
NUMBER = re.compile(r"\d[\d.,x]*")


def show(rows: Sequence[Outcome]) -> None:
    """Totals and causes to stdout."""
    console = Console()
    totals = Table("outcome", *GROUPS, "all", title="Coverage")
    for line in total_lines(rows):
        totals.add_row(*line)
    console.print(totals)
    causes = Table("cases", "outcome", "cause", "for example", title="Causes")
    for line in cause_lines(rows):
        causes.add_row(*line)
    console.print(causes)


def total_lines(rows: Sequence[Outcome]) -> list[list[str]]:
    counts = Counter((row.outcome, row.group) for row in rows)
    found = []
    for outcome in OUTCOMES:
        each = [counts[outcome, group] for group in GROUPS]
        if sum(each):
            found.append([outcome, *map(str, each), str(sum(each))])
    return found


def day_lines(rows: Sequence[Outcome]) -> list[list[str]]:
    """How many rows are of which day, the newest first."""
    counts = Counter((row.day, row.group) for row in rows)
    found = []
    for day in sorted({row.day for row in rows}, reverse=True):
        each = [counts[day, group] for group in GROUPS]
        found.append([day, *map(str, each), str(sum(each))])
    return found


def cause_lines(rows: Sequence[Outcome]) -> list[list[str]]:
    """What went wrong, numbers and paths taken out, the most common first."""
    causes: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.outcome not in (GOOD, "does not train eagerly"):
            causes.setdefault((row.outcome, cause(row)), []).append(row.case)
    ordered = sorted(causes.items(), key=lambda each: (-len(each[1]), each[0]))
    return [[str(len(names)), outcome, why, ", ".join(names[:4])] for (outcome, why), names in ordered]


def cause(row: Outcome) -> str:
    words = re.sub(r"/\S*/", "", row.words) or row.breaks
    return NUMBER.sub("N", words)[:140]


def markdown(rows: Sequence[Outcome]) -> str:
    """The same as a page, with one line per case."""
    lines = ["## Totals", "", *markdown_table(["outcome", *GROUPS, "all"], total_lines(rows)), ""]
    lines += ["## Days", "", *markdown_table(["last run", *GROUPS, "all"], day_lines(rows)), ""]
    lines += [
        "## Causes",
        "",
        *markdown_table(["cases", "outcome", "cause", "for example"], cause_lines(rows)),
        "",
    ]
    lines += ["## Cases", ""]
    cases = [
        [row.case, row.group, row.outcome, str(row.num_graphs or ""), str(row.num_nodes or ""), _seconds(row)]
        for row in sorted(rows, key=lambda row: (GROUPS.index(row.group), row.case))
    ]
    lines += markdown_table(["case", "group", "outcome", "graphs", "nodes", "first steps"], cases)
    return "\n".join(lines) + "\n"


def _seconds(row: Outcome) -> str:
    return f"{row.first_steps_seconds:.1f} s" if row.first_steps_seconds else ""
