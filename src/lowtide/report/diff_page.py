"""The page of two runs side by side: figures, both timelines in one chart, and changes by module."""

from typing import Any

from lowtide.facts import Step
from lowtide.planning.simulate import Timeline
from lowtide.report.page_packing import pack_integers, pack_strings, script_json
from lowtide.report.page_parts import render_page
from lowtide.report.results import Environment
from lowtide.report.side_by_side import (
    ComparedRun,
    change_rows,
    figure_rows,
    have_common,
    headline,
    module_changes,
    notes_of,
)
from lowtide.report.times import run_starts

_SCRIPTS = ("theme.js", "decode.js", "diff.js")


def render_diff(a: ComparedRun, b: ComparedRun, *, environment: Environment) -> str:
    """One self-contained page; a chart only where a profile is there to simulate from."""
    lines = [line for letter, run in (("A", a), ("B", b)) for line in _lines(letter, run)]
    baselines = [{**line, "label": "", "run": ""} for line in lines if not line["is_plan"]]
    if baselines[1:] == baselines[:1]:
        lines = [line for line in lines if line["label"] != "B, baseline"]
    budgets = [run.solution.budget_bytes for run in (a, b) if run.solution]
    return render_page(
        "diff.html",
        scripts=_SCRIPTS,
        title=f"{a.name} and {b.name}",
        a=a,
        b=b,
        environment=environment,
        data=script_json({"lines": lines, "budgets": sorted(set(budgets))}),
        lines=lines,
        headline=headline(a, b),
        figures=figure_rows(a, b),
        changes=change_rows(module_changes(a, b)),
        has_changes=have_common(a, b),
        notes=notes_of(a, b),
    )


def _lines(letter: str, run: ComparedRun) -> list[dict[str, Any]]:
    before, after = run.timelines
    if run.step is None:
        return []
    found = [(f"{letter}, baseline", before), (f"{letter}, with the plan", after)]
    return [_line(label, letter, run.step, timeline) for label, timeline in found if timeline is not None]


def _line(label: str, letter: str, step: Step, timeline: Timeline) -> dict[str, Any]:
    starts = [round(seconds * 1e9) for seconds in run_starts(step, timeline)]
    return {
        "label": label,
        "run": letter,
        "is_plan": label.endswith("plan"),
        "peak": timeline.peak_position,
        "starts": pack_integers(starts),
        "bytes": pack_integers(int(nbytes) for nbytes in timeline.live_bytes),
        "names": pack_strings([step.nodes[rank].name for rank in timeline.order]),
        "modules": pack_strings([step.nodes[rank].module for rank in timeline.order]),
    }
