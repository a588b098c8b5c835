"""`lowtide plan`: which activations to keep and which to recompute, for a budget."""

from pathlib import Path
from typing import Annotated

import typer

from lowtide.cli.options import Budget, Folder, Force, Json, Planner, Quiet, Verbose
from lowtide.cli.output import claim_folder
from lowtide.cli.terminal import session


def plan(
    profile: Annotated[
        Path,
        typer.Argument(metavar="PROFILE", help="A profile.json of `lowtide profile`.", show_default=False),
    ],
    *,
    budget: Budget,
    planner: Planner = "auto",
    folder: Folder = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Decide what to recompute so that the step fits into a budget. Needs no torch.

    With -o writes plan.json and ac_decisions.csv.
    """
    with session(as_json=as_json, quiet=quiet, verbose=verbose) as terminal:
        from lowtide.cli.files import DECISIONS, PLAN, load_profile, save_plan
        from lowtide.cli.summaries import plan_summary, plan_tables

        out = claim_folder(folder, (PLAN, DECISIONS), force=force)
        measured, spec = load_profile(profile)
        name = spec.text if spec else str(profile)
        with terminal.working("planning"):
            made = measured.plan(budget, planner=planner)
        terminal.data(plan_summary(made.solution, name=name))
        terminal.show(*plan_tables(made.solution, name=name))
        if out is not None:
            save_plan(out / PLAN, made, spec)
            made.to_csv(out)
            terminal.note(f"wrote {out / PLAN}, {out / DECISIONS}")
