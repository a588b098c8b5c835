"""`lowtide explain`: what a plan does with one activation, and why."""

from pathlib import Path
from typing import Annotated

import typer

from lowtide.cli.options import Json, Quiet, Verbose
from lowtide.cli.output import table
from lowtide.cli.terminal import session


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
        from lowtide.cli.files import PROFILE, load_plan, load_profile
        from lowtide.report.explain import explain_rows, find_decision

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
