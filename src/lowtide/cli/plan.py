"""`lowtide plan`: which activations to keep and which to recompute, for a budget."""

import shlex

from lowtide.cli.options import (
    MEMORY_LIMIT,
    Budget,
    Device,
    Executor,
    ExecutorName,
    Folder,
    Force,
    ImageSize,
    Json,
    MemoryLimit,
    NoCache,
    Optimizer,
    OptionalBatchSize,
    Planner,
    Quiet,
    Ranks,
    Seed,
    SequenceLength,
    Shard,
    ShardKind,
    Source,
    StepInBackward,
    Swap,
    Verbose,
)
from lowtide.cli.output import claim_folder
from lowtide.cli.terminal import session


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
    swap: Swap = "",
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
        from lowtide.cli.files import DECISIONS, PLAN, save_plan
        from lowtide.cli.sources import on_device, open_source
        from lowtide.cli.summaries import plan_summary, plan_tables

        if executor is not ExecutorName.EAGER:
            from lowtide.running.inductor import executor_named

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
            swap=swap,
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
