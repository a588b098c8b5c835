"""`lowtide run`: profile, plan, verify and report in one."""

import shlex
from pathlib import Path

import typer

from lowtide.cli.options import (
    BatchSize,
    Budget,
    Force,
    ImageSize,
    Json,
    MemoryLimit,
    NoCache,
    Optimizer,
    OutputFolder,
    Planner,
    Quiet,
    Seed,
    SequenceLength,
    TargetText,
    TimedRuns,
    Verbose,
)
from lowtide.cli.output import claim_folder
from lowtide.cli.terminal import session
from lowtide.targets import TargetSpec

PROFILE, PLAN = "profile.json", "plan.json"


def run(
    target: TargetText,
    *,
    batch_size: BatchSize,
    budget: Budget,
    planner: Planner = "auto",
    image_size: ImageSize = None,
    sequence_length: SequenceLength = None,
    optimizer: Optimizer = None,
    seed: Seed = 0,
    memory_limit: MemoryLimit = "1GiB",
    no_cache: NoCache = False,
    timed_runs: TimedRuns = 5,
    folder: OutputFolder = Path("lowtide-out"),
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Profile a step, plan it for a budget, verify the plan in fresh processes, and write a report.

    Exits with 3 when the budget cannot be met, with 4 when results differ.
    """
    with session(as_json=as_json, quiet=quiet, verbose=verbose) as terminal:
        from lowtide.cli.bundle import FILES, write_bundle
        from lowtide.cli.results import verification_data, verification_exit, verification_tables
        from lowtide.cli.sources import profile_target
        from lowtide.cli.summaries import plan_summary, plan_tables, profile_summary, profile_tables

        out = claim_folder(folder, FILES, force=force)
        assert out is not None
        spec = TargetSpec(
            text=target,
            batch_size=batch_size,
            image_size=image_size,
            sequence_length=sequence_length,
            optimizer=optimizer,
            seed=seed,
        )
        name = f"{target}, batch {batch_size}"
        profile = profile_target(spec, terminal, memory_limit=memory_limit, cache=not no_cache)
        summary = profile_summary(profile, name=name)
        terminal.show(*profile_tables(summary))
        with terminal.working("planning"):
            plan = profile.plan(budget, planner=planner)
        terminal.show(*plan_tables(plan.solution, name=name))
        with terminal.working("verifying in fresh processes"):
            from lowtide import verification

            result = verification.verify(spec, plan, timed_runs=timed_runs)
        with terminal.working("writing the report"):
            files = write_bundle(out, spec=spec, profile=profile, plan=plan, result=result, name=name)
        terminal.show(*verification_tables(result, name=name))
        terminal.data(
            {
                "profile": summary,
                "plan": plan_summary(plan.solution, name=name),
                "verification": verification_data(result, name=name),
                "files": [str(path) for path in files],
            }
        )
        terminal.note(f"report: {out / 'report.html'}")
        for line in next_commands(out, floor_bytes=plan.solution.floor_bytes):
            terminal.note(line)
        raise typer.Exit(verification_exit(result))


def next_commands(out: Path, *, floor_bytes: int) -> list[str]:
    """What to type next, ready to be copied."""
    profile, plan = (shlex.quote(str(out / name)) for name in (PROFILE, PLAN))
    return [
        f"next: lowtide plan {profile} --budget {floor_bytes}   # the lowest reachable peak, at once",
        f"      lowtide tradeoff {profile} --measure 0   # what every budget costs",
        f"      lowtide verify {plan}   # again",
        f"      model = lowtide.load_plan({str(out / PLAN)!r}).apply(model)   # in your own training script",
    ]
