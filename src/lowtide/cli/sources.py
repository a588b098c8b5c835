"""From the typed options to a profile: capture and measure a target, or read a file."""

import gc
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.cli.command import Offered
from lowtide.cli.exit_codes import UsageError
from lowtide.cli.options import (
    Device,
    ImageSize,
    MemoryLimit,
    Mode,
    NoCache,
    Offload,
    OffloadWhat,
    On,
    Optimizer,
    ProfileMode,
    Ranks,
    Rounds,
    Seed,
    SequenceLength,
    Shard,
    ShardKind,
    StepInBackward,
    Swap,
)
from lowtide.cli.terminal import Terminal
from lowtide.errors import TargetError
from lowtide.facts.gpus import gpu_behind
from lowtide.zoo.targets import Target, TargetSpec

if TYPE_CHECKING:
    from lowtide.profiles import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """The step to profile, and how. A command has the options of the second block that it `offers`."""

    image_size: ImageSize = None
    sequence_length: SequenceLength = None
    optimizer: Optimizer = None
    seed: Seed = 0
    on: On = None
    memory_limit: MemoryLimit = "1GiB"
    no_cache: NoCache = False

    step_in_backward: StepInBackward = False
    offload: Offload = ""
    offload_what: OffloadWhat = "activations"
    rounds: Rounds = ""
    swap: Swap = ""
    ranks: Ranks = None
    shard: Shard = ShardKind.FSDP2
    device: Device = None
    mode: Mode = ProfileMode.OPS

    def spec(self, text: str, batch_size: int) -> TargetSpec:
        if self.on is not None and self.device is not None:
            raise UsageError(
                f"--on {self.on} is a device of this machine, and --device {self.device} a GPU that is not "
                "here: leave one of them out"
            )
        return TargetSpec(
            text=text,
            batch_size=batch_size,
            image_size=self.image_size,
            sequence_length=self.sequence_length,
            optimizer=self.optimizer,
            seed=self.seed,
            device=self.on,
        )

    @property
    def store(self) -> str:
        """The store for offloaded values; empty for none."""
        if self.offload and self.swap and self.offload != self.swap:
            raise UsageError(
                f"--offload {self.offload} and --swap {self.swap} differ: --swap is the earlier name of "
                "--offload, leave it out"
            )
        return self.offload or self.swap

    @property
    def given(self) -> list[str]:
        """The options that differ from their defaults, as typed."""
        changed = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        return [f"--{name.replace('_', '-')}" for name in changed]


def offers(*names: str) -> Offered:
    """Options of the first block, and `names` of the second."""
    always = ("image_size", "sequence_length", "optimizer", "seed", "on", "memory_limit", "no_cache")
    return Offered((*always, *names, *(("offload_what", "swap") if "offload" in names else ())))


def profile_target(
    spec: TargetSpec, terminal: Terminal, step: StepOptions, *, held: "list[Target] | None" = None
) -> "Profile":
    """Load the target and profile one step of it; in mode `run` by running it, if it fits.

    A refused plan of the profile names levers as long as the target is alive: `held` gets it, and the caller
    calls `release` after planning. Without `held` the target is freed.
    """
    found, target = _profile_target(spec, terminal, step)
    if held is not None:
        held.append(target)
        return found
    del target
    release([], found)
    return replace(found, lever_search=None)


def release(held: "list[Target]", profile: "Profile") -> None:
    """Free the targets that were held. Afterwards this process has nothing of them on an accelerator: fresh
    processes need that memory."""
    held.clear()
    if profile.step.device != "cpu" and gpu_behind(profile.step.device) is None:
        import torch

        gc.collect()
        torch.accelerator.empty_cache()


def _profile_target(spec: TargetSpec, terminal: Terminal, step: StepOptions) -> "tuple[Profile, Target]":
    offload = step.store
    with terminal.working(f"loading {spec.text}"):
        from lowtide import api

        target = spec.load()
    if step.mode is ProfileMode.RUN:
        if step.device is not None:
            raise UsageError(
                f"--mode run runs the step here, not on the {step.device}: leave one of them out"
            )
        if step.step_in_backward or offload:
            option = "--step-in-backward" if step.step_in_backward else "--offload"
            raise UsageError(f"--mode run runs the step as eager does: leave {option} out, or --mode run")
        from lowtide.experiments.measured import profile_by_running

        with terminal.counting(f"running {spec.text}") as progress:
            found = profile_by_running(
                target, memory_limit=step.memory_limit, cache=not step.no_cache, progress=progress
            )
        return found, target
    # capture has no progress; the bar moves when ops are measured
    with terminal.counting(f"profiling {spec.text}") as progress:
        found = api.profile(
            target.model,
            target.batch,
            optimizer=target.optimizer,
            loss=target.loss,
            memory_limit=step.memory_limit,
            cache=not step.no_cache,
            step_in_backward=step.step_in_backward,
            offload=offload,
            offload_what=step.offload_what,
            rounds=step.rounds,
            ranks=step.ranks,
            shard=step.shard,
            device=step.device,
            progress=progress,
        )
    return found, target


def open_source(
    source: str,
    terminal: Terminal,
    step: StepOptions,
    *,
    batch_size: int | None,
    held: "list[Target] | None" = None,
) -> tuple["Profile", TargetSpec | None, str]:
    """A profile from a `profile.json`, or of a TARGET; its target, where known; and its title. `held`: see
    `profile_target`."""
    if source.endswith(".json"):
        from lowtide.cli.output_files import load_profile

        given = [*(() if batch_size is None else ("--batch-size",)), *step.given]
        if given:
            raise UsageError(
                f"{given[0]} is for a TARGET, and '{source}' is profiled already: profile it anew"
            )
        profile, spec = load_profile(Path(source))
    elif batch_size is None:
        raise TargetError(f"how large a batch of '{source}'? Say --batch-size N")
    else:
        spec = step.spec(source, batch_size)
        profile = profile_target(spec, terminal, step, held=held)
    title = title_of(spec) if spec else source
    if step.ranks is not None:
        title += f", one of {step.ranks} processes ({step.shard})"
    return profile, spec, on_device(title, profile.step.device)


def title_of(spec: TargetSpec) -> str:
    return f"{spec.text}, batch {spec.batch_size}"


def on_device(title: str, device: str) -> str:
    """The title of a step, with its device unless that is the CPU."""
    return title if device == "cpu" else f"{title}, on {device}"
