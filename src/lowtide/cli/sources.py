"""From what was typed to a profile: capture and measure a target, or read a file."""

from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.cli.options import MEMORY_LIMIT
from lowtide.cli.terminal import Terminal, UsageError
from lowtide.errors import TargetError
from lowtide.facts.gpus import gpu_behind
from lowtide.zoo.targets import TargetSpec

if TYPE_CHECKING:
    from lowtide.profiles import Profile


def profile_target(
    spec: TargetSpec,
    terminal: Terminal,
    *,
    memory_limit: str,
    cache: bool,
    mode: str = "ops",
    step_in_backward: bool = False,
    offload: str = "",
    ranks: int | None = None,
    shard: str = "fsdp2",
    device: str | None = None,
) -> "Profile":
    """Load the target and profile one step of it; in mode `run` by running it, if it fits.

    With `ranks`, the step of one of so many processes; with `device`, on a GPU that is not here.
    """
    with terminal.working(f"loading {spec.text}"):
        from lowtide import api

        target = spec.load()
    if mode == "run" and device is not None:
        raise UsageError(f"--mode run runs the step here, not on the {device}: leave one of them out")
    if mode == "run" and (step_in_backward or offload):
        option = "--step-in-backward" if step_in_backward else "--offload"
        raise UsageError(f"--mode run runs the step as eager does: leave {option} out, or --mode run")
    if mode == "run":
        from lowtide.experiments.measured import profile_by_running

        with terminal.counting(f"running {spec.text}") as progress:
            return profile_by_running(target, memory_limit=memory_limit, cache=cache, progress=progress)
    # Nothing tells how far capture is; the bar starts to move when ops are measured.
    with terminal.counting(f"profiling {spec.text}") as progress:
        return api.profile(
            target.model,
            target.batch,
            optimizer=target.optimizer,
            loss=target.loss,
            memory_limit=memory_limit,
            cache=cache,
            step_in_backward=step_in_backward,
            offload=offload,
            ranks=ranks,
            shard=shard,
            device=device,
            progress=progress,
        )


def on_device(name: str, profile: "Profile") -> str:
    """What a step is called, with the GPU that it was estimated for."""
    return name if gpu_behind(profile.step.device) is None else f"{name}, on {profile.step.device}"


def open_source(
    source: str,
    terminal: Terminal,
    *,
    batch_size: int | None,
    image_size: int | None,
    sequence_length: int | None,
    optimizer: str | None,
    seed: int,
    memory_limit: str,
    cache: bool,
    step_in_backward: bool = False,
    offload: str = "",
    ranks: int | None = None,
    shard: str = "fsdp2",
    device: str | None = None,
) -> tuple["Profile", TargetSpec | None]:
    """A profile from a `profile.json`, or of a TARGET; and what it is a profile of, where known."""
    if source.endswith(".json"):
        from lowtide.cli.output_files import load_profile

        given = {
            "--batch-size": batch_size is not None,
            "--image-size": image_size is not None,
            "--sequence-length": sequence_length is not None,
            "--optimizer": optimizer is not None,
            "--seed": seed != 0,
            "--ranks": ranks is not None,
            "--device": device is not None,
            "--memory-limit": memory_limit != MEMORY_LIMIT,
            "--no-cache": not cache,
            "--step-in-backward": step_in_backward,
            "--offload": bool(offload),
        }
        if any(given.values()):
            option = next(name for name, was_given in given.items() if was_given)
            raise UsageError(f"{option} is for a TARGET, and '{source}' is profiled already: profile it anew")
        return load_profile(Path(source))
    if batch_size is None:
        raise TargetError(f"how large a batch of '{source}'? Say --batch-size N")
    spec = TargetSpec(
        text=source,
        batch_size=batch_size,
        image_size=image_size,
        sequence_length=sequence_length,
        optimizer=optimizer,
        seed=seed,
    )
    found = profile_target(
        spec,
        terminal,
        memory_limit=memory_limit,
        cache=cache,
        step_in_backward=step_in_backward,
        offload=offload,
        ranks=ranks,
        shard=shard,
        device=device,
    )
    return found, spec
