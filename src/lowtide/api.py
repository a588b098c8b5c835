"""The library's front door: profile, plan, apply, verify."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn

from lowtide import display
from lowtide.capture.graphs import user_tensors
from lowtide.capture.loop import Loop, Loss, Optimizers
from lowtide.capture.on_paper import on_paper
from lowtide.capture.step import capture
from lowtide.checking.verification import Verification
from lowtide.checking.verification import verify as verify_target
from lowtide.errors import LowtideError
from lowtide.facts.sizes import parse_size
from lowtide.plans import Plan, load_plan
from lowtide.profiles import Profile, load_profile
from lowtide.profiling.costing import MEMORY_LIMIT_BYTES, measure_costs
from lowtide.profiling.whole_run import run_costs
from lowtide.running.loop_watch import leave
from lowtide.running.runner import attach, remove, runner_of
from lowtide.torchside.optimizers import as_one
from lowtide.torchside.sharded import units_of
from lowtide.zoo.targets import Target

__all__ = [
    "Plan",
    "Profile",
    "Verification",
    "checkpoint",
    "load_plan",
    "load_profile",
    "profile",
    "remove",
    "verify",
]

MODES = ("ops", "run")


def profile(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: Optimizers | None = None,
    loss: Loss | None = None,
    memory_limit: str | int = MEMORY_LIMIT_BYTES,
    cache: bool = True,
    mode: str = "ops",
    ranks: int | None = None,
    shard: str = "fsdp2",
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Capture one training step and measure its ops, without running the step.

    `batch`: a tensor or tuple (positional arguments) or a dict (keyword arguments). `optimizer`: one, or a
    list of those that step one after the other. `loss`: a function
    of the model's output; without it the output's `.loss`, a scalar output, or the sum of its floating
    tensors. Ops are timed one at a time, within `memory_limit`, and remembered on disk unless
    `cache=False`. On a terminal, a line on stderr shows how far it is; `progress(done, total)` is called
    instead, if given. With `mode="run"` the captured graphs are run whole instead, which needs the memory
    of the step. With `ranks`, the step of one process among so many, if every block of the model and then
    the model were sharded (`fully_shard`): a prediction that needs none of the others.
    """
    if mode not in MODES:
        raise LowtideError(f"there is no profiling mode '{mode}': choose one of {', '.join(MODES)}")
    if not isinstance(model, nn.Module):
        raise LowtideError(f"profile() needs an nn.Module, not a {type(model).__name__}")
    if runner_of(model) is not None:
        raise LowtideError(
            "this model already runs by a plan: call lowtide.remove(model) before profiling it"
        )
    if mode == "run" and (ranks is not None or units_of(model)):
        raise LowtideError(
            "mode 'run' runs whole graphs in one process: profile a sharded model with mode 'ops'"
        )
    limit_bytes = parse_size(memory_limit)
    leave()
    with display.silenced() if progress else nullcontext(), display.shown() as line:
        line.stage("capturing the step")
        paper = None if ranks is None else on_paper(model, ranks=ranks, shard=shard)
        captured = capture(model, batch, optimizer=as_one(optimizer), loss=loss, paper=paper)
        line.stage("measuring its ops")
        count = progress or line.count
        if mode == "run":
            tensors = user_tensors(model, batch)
            found = run_costs(
                captured, tensors, memory_limit_bytes=limit_bytes, use_cache=cache, progress=count
            )
        else:
            found = measure_costs(captured, memory_limit_bytes=limit_bytes, use_cache=cache, progress=count)
    return Profile(*found, loop=Loop.of(optimizer, loss))


def checkpoint(
    model: nn.Module,
    batch: Any,
    *,
    budget: str | int,
    optimizer: Optimizers | None = None,
    loss: Loss | None = None,
    planner: str = "auto",
) -> nn.Module:
    """Let `model` train with a peak of at most `budget` bytes: profile, plan and apply in one.

    Returns the same module. A budget that cannot be met raises `BudgetTooSmall` and changes nothing.
    """
    with display.shown() as line:
        found = profile(model, batch, optimizer=optimizer, loss=loss)
        line.stage("planning")
        return found.plan(budget, planner).apply(model)


def verify(
    model: nn.Module,
    batch: Any,
    plan: Plan,
    *,
    optimizer: Optimizers | None = None,
    loss: Loss | None = None,
    timed_runs: int = 5,
) -> Verification:
    """Compare training with and without `plan` to the last bit, and measure both peaks and times.

    Works on copies in fresh processes; the model here is not trained. Where the model cannot be sent
    to another process, copies in this one are used and `fresh_process` is False.
    """
    if units_of(model):
        raise LowtideError(
            "a sharded model cannot be copied into a fresh process: verify the model before fully_shard, or "
            "train the sharded one with and without its plan and compare"
        )
    applied = runner_of(model)
    remove(model)
    try:
        return verify_target(
            Target(type(model).__name__, model, batch, as_one(optimizer), loss), plan, timed_runs=timed_runs
        )
    finally:
        if applied is not None:
            attach(model, applied)
