"""`lowtide profile`: where the memory and the time of a training step go.

`lowtide plan`: which activations to keep and which to recompute, for a budget.

`lowtide verify`: a plan's true peak, and its results against eager training.
"""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from lowtide.cli.options import (
    MEMORY_LIMIT,
    BatchSize,
    Budget,
    Device,
    Executor,
    ExecutorName,
    Folder,
    Force,
    ImageSize,
    Json,
    MemoryLimit,
    Mode,
    NoCache,
    Offload,
    Optimizer,
    OptionalBatchSize,
    Planner,
    ProfileMode,
    Quiet,
    Ranks,
    Seed,
    SequenceLength,
    Shard,
    ShardKind,
    Source,
    StepInBackward,
    TargetText,
    TimedRuns,
    Verbose,
)
from lowtide.cli.terminal import claim_folder, session
from lowtide.errors import TargetError
from lowtide.zoo.targets import TargetSpec


def profile(
    target: TargetText,
    *,
    batch_size: BatchSize,
    image_size: ImageSize = None,
    sequence_length: SequenceLength = None,
    optimizer: Optimizer = None,
    seed: Seed = 0,
    memory_limit: MemoryLimit = MEMORY_LIMIT,
    no_cache: NoCache = False,
    step_in_backward: StepInBackward = False,
    offload: Offload = "",
    device: Device = None,
    mode: Mode = ProfileMode.OPS,
    folder: Folder = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show where the memory and the time of one training step go, without running it (unless --mode run).

    With -o writes profile.json, node_stats.csv and activation_stats.csv. Exits with 3 when --mode run
    does not fit into this machine's memory.
    """
    with session(as_json=as_json, quiet=quiet, verbose=verbose) as terminal:
        from lowtide.cli.output_files import (
            ACTIVATIONS,
            NODES,
            PROFILE,
            budget_to_try,
            plan_command,
            save_profile,
        )
        from lowtide.cli.sources import on_device, profile_target
        from lowtide.cli.tables import profile_summary, profile_tables

        out = claim_folder(folder, (PROFILE, NODES, ACTIVATIONS), force=force)
        spec = TargetSpec(
            text=target,
            batch_size=batch_size,
            image_size=image_size,
            sequence_length=sequence_length,
            optimizer=optimizer,
            seed=seed,
        )
        measured = profile_target(
            spec,
            terminal,
            memory_limit=memory_limit,
            cache=not no_cache,
            mode=mode,
            device=device,
            step_in_backward=step_in_backward,
            offload=offload,
        )
        summary = profile_summary(measured, name=on_device(f"{target}, batch {batch_size}", measured))
        if out is not None:
            save_profile(out / PROFILE, measured, spec)
            measured.to_csv(out)
        terminal.data(summary)
        terminal.show(*profile_tables(summary))
        if out is not None and not quiet:
            terminal.note(f"wrote {out / PROFILE}, {out / NODES}, {out / ACTIVATIONS}")
            with terminal.working("looking for the lowest reachable peak"):
                floor_bytes = measured.floor_bytes
            budget = budget_to_try(peak_bytes=measured.peak_bytes, floor_bytes=floor_bytes)
            terminal.note(plan_command(out, budget=budget))


def plan(
    source: Source,
    *,
    budget: Budget,
    planner: Planner = "auto",
    batch_size: OptionalBatchSize = None,
    image_size: ImageSize = None,
    sequence_length: SequenceLength = None,
    optimizer: Optimizer = None,
    seed: Seed = 0,
    ranks: Ranks = None,
    shard: Shard = ShardKind.FSDP2,
    device: Device = None,
    memory_limit: MemoryLimit = MEMORY_LIMIT,
    no_cache: NoCache = False,
    step_in_backward: StepInBackward = False,
    offload: Offload = "",
    executor: Executor = ExecutorName.EAGER,
    folder: Folder = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Decide what to recompute so that a step fits into a budget. From a profile.json at once, without torch.

    With -o writes plan.json and ac_decisions.csv.
    """
    with session(as_json=as_json, quiet=quiet, verbose=verbose) as terminal:
        from lowtide.cli.output_files import DECISIONS, PLAN, save_plan
        from lowtide.cli.sources import on_device, open_source
        from lowtide.cli.tables import plan_summary, plan_tables

        if executor is not ExecutorName.EAGER:
            from lowtide.runtime.compiled_plans import executor_named

            executor_named(executor)  # there, or refused before any work
        out = claim_folder(folder, (PLAN, DECISIONS), force=force)
        profile, spec = open_source(
            source,
            terminal,
            batch_size=batch_size,
            image_size=image_size,
            sequence_length=sequence_length,
            optimizer=optimizer,
            seed=seed,
            ranks=ranks,
            shard=shard,
            device=device,
            memory_limit=memory_limit,
            cache=not no_cache,
            step_in_backward=step_in_backward,
            offload=offload,
        )
        name = f"{spec.text}, batch {spec.batch_size}" if spec else source
        if ranks is not None:
            name += f", one of {ranks} processes ({shard})"
        name = on_device(name, profile)
        with terminal.working("planning"):
            made = profile.plan(budget, planner=planner, executor=executor)
        if out is not None:
            save_plan(out / PLAN, made, spec)
            made.to_csv(out)
        terminal.data(plan_summary(made.solution, name=name))
        terminal.show(*plan_tables(made.solution, name=name))
        if out is not None:
            terminal.note(f"wrote {out / PLAN}, {out / DECISIONS}")
        if out is not None and ranks is None and device is None:
            terminal.note(f"next: lowtide verify {shlex.quote(str(out / PLAN))}")


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
        from lowtide.cli.output_files import VERIFICATION, load_plan
        from lowtide.cli.tables import outcome_data, outcome_exit, outcome_tables
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
