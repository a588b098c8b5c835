"""`lowtide run`: profile, plan, verify and report in one."""

from pathlib import Path

import typer

from lowtide.cli.options import (
    MEMORY_LIMIT,
    BatchSize,
    Budget,
    Executor,
    ExecutorName,
    Force,
    ImageSize,
    Json,
    MemoryLimit,
    NoCache,
    Offload,
    Optimizer,
    OutputFolder,
    Planner,
    Quiet,
    Seed,
    SequenceLength,
    StepInBackward,
    TargetText,
    TimedRuns,
    Verbose,
)
from lowtide.cli.terminal import claim_folder, session
from lowtide.errors import BudgetTooSmall
from lowtide.units import round_up_size
from lowtide.zoo.targets import TargetSpec


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
    memory_limit: MemoryLimit = MEMORY_LIMIT,
    no_cache: NoCache = False,
    step_in_backward: StepInBackward = False,
    offload: Offload = "",
    executor: Executor = ExecutorName.EAGER,
    timed_runs: TimedRuns = 5,
    folder: OutputFolder = Path("lowtide-out"),
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Profile a step, plan it for a budget, verify the plan in fresh processes, and write a report.

    A step that only the plan makes small enough for this machine runs with the plan alone, and is not
    compared. A budget that cannot be met leaves the profile. Exits with 3 when the budget or this
    machine's memory cannot be met, with 4 when results differ.
    """
    with session(as_json=as_json, quiet=quiet, verbose=verbose) as terminal:
        from lowtide.cli.output_files import (
            FILES,
            after_run,
            plan_command,
            write_plan,
            write_profile,
            write_results,
        )
        from lowtide.cli.sources import profile_target
        from lowtide.cli.tables import (
            outcome_data,
            outcome_exit,
            outcome_tables,
            plan_summary,
            plan_tables,
            profile_summary,
            profile_tables,
        )
        from lowtide.runtime.compiled_plans import executor_named

        executor_named(executor)  # there, or refused before any work
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
        profile = profile_target(
            spec,
            terminal,
            memory_limit=memory_limit,
            cache=not no_cache,
            step_in_backward=step_in_backward,
            offload=offload,
        )
        summary = profile_summary(profile, name=name)
        terminal.show(*profile_tables(summary))
        files = write_profile(out, spec=spec, profile=profile)
        try:
            with terminal.working("planning"):
                plan = profile.plan(budget, planner=planner, executor=executor)
        except BudgetTooSmall as error:
            terminal.note(f"wrote {', '.join(map(str, files))}; there is no plan")
            budget = round_up_size(error.floor_bytes)
            if executor is ExecutorName.EAGER:
                terminal.note(plan_command(out, budget=budget, planner=planner))
            else:
                terminal.note(f"next: the same command with --budget {budget} --force")
            raise
        files += write_plan(out, spec=spec, plan=plan)
        terminal.show(*plan_tables(plan.solution, name=name))
        with terminal.working("verifying in fresh processes"):
            from lowtide.experiments.measured import run_plan

            outcome = run_plan(spec, plan, timed_runs=timed_runs)
        with terminal.working("writing the report"):
            files += write_results(out, profile=profile, plan=plan, outcome=outcome, name=name)
        terminal.show(*outcome_tables(outcome, budget_bytes=plan.budget_bytes, name=name))
        terminal.data(
            {
                "profile": summary,
                "plan": plan_summary(plan.solution, name=name),
                "verification": outcome_data(outcome, name=name),
                "files": [str(path) for path in files],
            }
        )
        terminal.note(f"report: {out / 'report.html'}")
        for line in after_run(
            out,
            floor_bytes=profile.floor_bytes,
            step_in_backward=plan.solution.step_in_backward,
            executor=executor,
        ):
            terminal.note(line)
        raise typer.Exit(outcome_exit(outcome, budget_bytes=plan.budget_bytes))
