"""`lowtide verify`: a plan's true peak, and its results against eager training."""

from pathlib import Path
from typing import Annotated

import typer

from lowtide.cli.options import Folder, Force, Json, Quiet, TimedRuns, Verbose
from lowtide.cli.output import claim_folder
from lowtide.cli.terminal import session
from lowtide.errors import TargetError


def verify(
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN", help="A plan.json of `lowtide plan`.", show_default=False)
    ],
    *,
    timed_runs: TimedRuns = 5,
    folder: Folder = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train without and with a plan in fresh processes: compare to the last bit, measure peaks and times.

    The target is the one that the plan was made for. A step that only the plan makes small enough for
    this machine runs with the plan alone, and is not compared. With -o writes verification.json.
    Exits with 4 when results differ, with 3 when the peak is above the budget or the machine too small.
    """
    with session(as_json=as_json, quiet=quiet, verbose=verbose) as terminal:
        from lowtide.cli.files import VERIFICATION, load_plan
        from lowtide.cli.results import outcome_data, outcome_exit, outcome_tables
        from lowtide.facts.serial import save_json

        out = claim_folder(folder, (VERIFICATION,), force=force)
        made, spec = load_plan(plan)
        if spec is None:
            raise TargetError(f"'{plan}' does not say what it was made for: make it with `lowtide plan`")
        with terminal.working(f"verifying {spec.text}"):
            from lowtide.experiments.measured import run_plan

            outcome = run_plan(spec, made, timed_runs=timed_runs)
        name = f"{spec.text}, batch {spec.batch_size}"
        data = outcome_data(outcome, name=name)
        if out is not None:
            save_json(out / VERIFICATION, data)
        terminal.data(data)
        terminal.show(*outcome_tables(outcome, budget_bytes=made.budget_bytes, name=name))
        if out is not None:
            terminal.note(f"wrote {out / VERIFICATION}")
        raise typer.Exit(outcome_exit(outcome, budget_bytes=made.budget_bytes))
