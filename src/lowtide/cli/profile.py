"""`lowtide profile`: where the memory and the time of a training step go."""

from lowtide.cli.options import (
    MEMORY_LIMIT,
    BatchSize,
    Device,
    Folder,
    Force,
    ImageSize,
    Json,
    MemoryLimit,
    Mode,
    NoCache,
    Optimizer,
    ProfileMode,
    Quiet,
    Seed,
    SequenceLength,
    StepInBackward,
    Swap,
    TargetText,
    Verbose,
)
from lowtide.cli.output import claim_folder
from lowtide.cli.terminal import session
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
    swap: Swap = "",
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
        from lowtide.cli.files import ACTIVATIONS, NODES, PROFILE, save_profile
        from lowtide.cli.next_steps import budget_to_try, plan_command
        from lowtide.cli.sources import on_device, profile_target
        from lowtide.cli.summaries import profile_summary, profile_tables

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
            swap=swap,
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
