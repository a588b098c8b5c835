"""`lowtide explain`: what a plan does with one activation, and why.

`lowtide models`: the built-in targets.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lowtide.cli.options import Json, Quiet, Verbose
from lowtide.cli.terminal import session, table
from lowtide.zoo.catalog import CATALOG


def explain(
    plan: Annotated[
        Path,
        typer.Argument(metavar="PLAN", help="A plan.json of `lowtide plan` or `run`.", show_default=False),
    ],
    name: Annotated[
        str,
        typer.Argument(
            metavar="ACTIVATION", help="A name from ac_decisions.csv or the report.", show_default=False
        ),
    ],
    *,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Say what a plan does with an activation, why, and which ops make and read it.

    The ops come from the profile.json beside the plan; without one, the decision alone is shown.
    """
    with session(as_json=as_json, quiet=quiet, verbose=verbose) as terminal:
        from lowtide.cli.output_files import PROFILE, load_plan, load_profile
        from lowtide.report.explanation import explain_rows, find_decision

        solution = load_plan(plan)[0].solution
        decision = find_decision(solution, name)
        beside = plan.parent / PROFILE
        step = load_profile(beside)[0].step if beside.exists() else None
        if step is not None and step.fingerprint != solution.fingerprint:
            terminal.note(f"{beside} is of another step: only the decision is shown")
            step = None
        rows = explain_rows(solution, decision, step)
        terminal.data(dict(rows))
        terminal.show(table("", ("", ""), rows))


def models(*, as_json: Json = False, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """List the built-in targets and the size that each one takes."""
    with session(as_json=as_json, quiet=quiet, verbose=verbose) as terminal:
        entries = CATALOG.values()
        terminal.data([asdict(entry) for entry in entries])
        rows = [
            (entry.name, f"--{entry.option.replace('_', '-')} {getattr(entry, entry.option)}", entry.summary)
            for entry in entries
        ]
        terminal.show(table("Built-in targets", ("name", "size (default)", "what it is"), rows))
