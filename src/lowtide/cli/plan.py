"""`lowtide plan`: which activations to keep and which to recompute, for a budget."""

from pathlib import Path
from typing import Annotated

import typer

from lowtide.cli.files import PLAN, load_profile, save_plan
from lowtide.cli.options import Budget, Folder, Force, Json, Planner, Quiet, Verbose
from lowtide.cli.output import claim_folder
from lowtide.cli.terminal import session

DECISIONS = "ac_decisions.csv"


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
        from lowtide.cli.summaries import plan_summary, plan_tables
        from lowtide.planners import solve
        from lowtide.report.csvs import write_decisions
        from lowtide.simulate import plain_order, simulate
        from lowtide.sizes import parse_budget

        out = claim_folder(folder, (PLAN, DECISIONS), force=force)
        step, spec = load_profile(profile)
        name = spec.text if spec else str(profile)
        with terminal.working("planning"):
            peak_bytes = simulate(step, plain_order(step)).peak_bytes
            solution = solve(step, budget_bytes=parse_budget(budget, whole=peak_bytes), planner=planner)
        terminal.data(plan_summary(solution, name=name))
        terminal.show(*plan_tables(solution, name=name))
        if out is not None:
            save_plan(out / PLAN, solution, spec)
            write_decisions(out / DECISIONS, solution.decisions)
            terminal.note(f"wrote {out / PLAN}, {out / DECISIONS}")
