"""`lowtide diff`: two runs side by side, as a table and as a page."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowtide.cli.command import command
from lowtide.cli.options import Force
from lowtide.cli.terminal import Dotted, Terminal, table
from lowtide.errors import LowtideError
from lowtide.facts.serial import SOLUTION_FORMAT, STEP_FORMAT, load_json

if TYPE_CHECKING:
    from lowtide.report.results import Measurement
    from lowtide.report.side_by_side import ComparedRun

NUM_CHANGES = 15
KINDS = "an output folder of `lowtide run`, a plan.json or a profile.json"


def _run(metavar: str) -> Any:
    return typer.Argument(
        metavar=metavar,
        help="An output folder of `lowtide run`, a plan.json or a profile.json.",
        show_default=False,
    )


@command
def diff(
    terminal: Terminal,
    a: Annotated[Path, _run("A")],
    b: Annotated[Path, _run("B")],
    *,
    page: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="HTML page to write, or a folder for diff.html."),
    ] = None,
    force: Force = False,
) -> None:
    """Compare two runs: budget, peak, time, floor, and what happens to activations by module. Needs no torch.

    With -o writes a page with both timelines in one chart, such as diff.html.
    """
    from lowtide.facts.files import write_atomic
    from lowtide.report.side_by_side import (
        change_rows,
        figure_rows,
        have_common,
        headline,
        module_changes,
        notes_of,
    )

    if page is not None and (page.is_dir() or not page.suffix):
        page /= "diff.html"
    if page is not None and page.exists() and not force:
        raise LowtideError(f"{page} is already there: say --force to replace it, or choose another -o")
    with terminal.working("reading both runs"):
        one, other = _load(terminal, a), _load(terminal, b)
    changes = module_changes(one, other)
    terminal.data(
        {
            "headline": headline(one, other),
            "a": one.figures,
            "b": other.figures,
            "changes": [asdict(change) for change in changes],
        }
    )
    columns = ("", "A>", "B>", "from A to B>")
    terminal.show(headline(one, other))
    target = f"{one.target}: " if one.target == other.target and one.target else ""
    terminal.show(table(f"{target}A {a}, B {b}", columns, figure_rows(one, other)))
    if have_common(one, other):
        terminal.show(_changes(change_rows(changes)))
    terminal.show(*(f"note: {note}" for note in notes_of(one, other)))
    if page is not None:
        from lowtide.cli.output_files import environment
        from lowtide.report.diff_page import render_diff

        write_atomic(page, render_diff(one, other, environment=environment("cpu", measured=False)))
        terminal.note(f"wrote {page}")


def _changes(rows: list[tuple[str, str, str, str, str]]) -> Any:
    if not rows:
        return "both plans treat every activation alike"
    title = f"What changes, by module ({min(NUM_CHANGES, len(rows))} of {len(rows)})"
    columns = ("module", "from A to B", "activations>", "bytes>", "time>")
    return table(title, columns, [(Dotted(path), *rest) for path, *rest in rows[:NUM_CHANGES]])


def _load(terminal: Terminal, path: Path) -> "ComparedRun":
    """A run from its files: those of a folder, or a file and the profile beside it."""
    from lowtide.cli.output_files import PLAN, PROFILE, VERIFICATION, load_plan, load_profile
    from lowtide.cli.sources import title_of
    from lowtide.report.side_by_side import ComparedRun

    plan_file, profile_file = (path / PLAN, path / PROFILE) if path.is_dir() else _kind_of(path)
    plan, spec = (None, None)
    if plan_file is not None and plan_file.exists():
        plan, spec = load_plan(plan_file)
    profile = None
    if profile_file.exists():
        profile, profiled = load_profile(profile_file)
        if plan is not None and profile.step.fingerprint != plan.solution.fingerprint:
            terminal.note(f"{profile_file} is of another step than the plan: left out")
            profile = None
        spec = spec or profiled
    if plan is None and profile is None:
        raise LowtideError(f"there is no plan.json and no profile.json in '{path}': name {KINDS}")
    measurement = None
    if path.is_dir() and plan is not None and (path / VERIFICATION).exists():
        measurement = _measurement(path / VERIFICATION, predicted=plan.peak_bytes)
        if measurement is None:
            terminal.note(f"{path / VERIFICATION} is of another plan: left out")
    solution = plan.solution if plan is not None else None
    floor = profile.floor_bytes if profile is not None else solution.floor_bytes if solution else None
    return ComparedRun(
        name=str(path),
        target=title_of(spec) if spec is not None else "",
        step=profile.step if profile is not None else None,
        solution=solution,
        measurement=measurement,
        floor_bytes=floor,
    )


def _kind_of(path: Path) -> tuple[Path | None, Path]:
    """The files of a plan and of a profile behind a path to one of them."""
    from lowtide.cli.output_files import PROFILE

    kind = load_json(path).get("format")
    if kind == SOLUTION_FORMAT:
        return path, path.parent / PROFILE
    if kind == STEP_FORMAT:
        return None, path
    raise LowtideError(f"'{path}' is no run to compare: name {KINDS}")


def _measurement(path: Path, *, predicted: int) -> "Measurement | None":
    """The figures of a verification; None where it is of another plan."""
    from lowtide.report.results import Measurement, StepMeasurement

    data = load_json(path)
    try:
        if "not_compared" in data:
            baseline, planned = (StepMeasurement(**data[key]) for key in ("baseline", "planned"))
            found = Measurement(baseline=baseline, planned=planned)
            return found if planned.predicted_peak_bytes == predicted else None
        if data["predicted_peak_bytes"] != predicted:
            return None
        return Measurement(
            baseline=StepMeasurement(
                measured_peak_bytes=data["baseline_measured_peak_bytes"],
                seconds_median=_median(data["baseline_step_timing"]),
            ),
            planned=StepMeasurement(
                measured_peak_bytes=data["measured_peak_bytes"], seconds_median=_median(data["step_timing"])
            ),
            noise=data["noise"],
            exact=data["exact"],
        )
    except (KeyError, TypeError) as error:
        raise LowtideError(
            f"'{path}' is no verification ({error!r}): make it again with lowtide verify"
        ) from error


def _median(timing: dict[str, Any] | None) -> float | None:
    from statistics import median

    return median(timing["runs"]) if timing else None
