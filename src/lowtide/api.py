"""The functions of the library: profile, plan, apply, verify."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from lowtide import display
from lowtide.analyze.captured_step import Captured, capture
from lowtide.errors import CannotMoveToFreshProcess, LowtideError
from lowtide.facts import Step
from lowtide.facts.auto_budget import FreeMemory, auto_budget
from lowtide.facts.gpus import GPUS, Gpu
from lowtide.facts.plan import OffloadTarget, offload_text, parse_offload
from lowtide.facts.serial import solution_to_dict
from lowtide.facts.sizes import is_auto, parse_size
from lowtide.lever_search import LeverSearch, lever_search
from lowtide.offload.offload_store import open_store
from lowtide.optim.joined_optimizers import join_optimizers
from lowtide.parallel.ranks import Ranks, count_buckets, plan_together, ranks_of
from lowtide.parallel.simulated_sharding import SimulatedSharding, simulate_sharding
from lowtide.plans import Plan, expectation, with_note
from lowtide.profiles import Profile
from lowtide.profiling.costing import MEMORY_LIMIT_BYTES, KnownCosts, estimate_costs, measure_costs
from lowtide.profiling.free_memory import free_memory
from lowtide.profiling.roofline import estimated_costs
from lowtide.profiling.transfer_speed import measure_transfer_speed
from lowtide.profiling.whole_run import run_costs
from lowtide.runtime.executor import executor_named
from lowtide.runtime.loop_watch import leave
from lowtide.runtime.runner import attach, remove, runner_of
from lowtide.stage_log import say
from lowtide.torch_compat import ddp
from lowtide.torch_compat.autograd_engine import outside_autocast
from lowtide.torch_compat.fsdp2 import units_of
from lowtide.trace.batch_arguments import refuse_other_arguments
from lowtide.trace.identity import user_tensors
from lowtide.trace.model_call import Loop, Loss, Optimizers, split_batch
from lowtide.trace.step_device import device_of
from lowtide.verification.comparison import planned
from lowtide.verification.measure_step import Measured, autocast_here, measure_here
from lowtide.verification.measure_step import measure_step as measure_target
from lowtide.verification.verify_plan import Verification, measure_plan
from lowtide.verification.verify_plan import verify as verify_target
from lowtide.zoo.targets import Target

MODES = ("ops", "run")
SHARDED_OFFLOAD = "offload is not planned for models that are sharded over processes: leave offload out"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Training:
    """The user's statements about the loop around the model."""

    optimizer: Optimizers | None
    loss: Loss | None
    accumulate: bool
    reserve: str | int
    step_in_backward: bool
    holds_outputs: bool
    offload: str

    @property
    def reserve_bytes(self) -> int:
        return parse_size(self.reserve) if self.reserve else 0

    def loop(self, model: nn.Module, batch: Any) -> Loop:
        return Loop.of(
            self.optimizer,
            self.loss,
            holds_outputs=self.holds_outputs,
            reserve_bytes=self.reserve_bytes,
            origins=user_tensors(model, batch),
        )

    @property
    def settings(self) -> list[tuple[str, str]]:
        """The settings that must be the same on all ranks."""
        named = ("accumulate", "reserve_bytes", "step_in_backward", "holds_outputs", "offload")
        return [(name, str(getattr(self, name))) for name in named]

    @property
    def offload_to(self) -> OffloadTarget | None:
        return parse_offload(self.offload) if self.offload else None

    def check(self, model: nn.Module, batch: Any, ranks: Ranks | None) -> None:
        if not isinstance(model, nn.Module):
            raise LowtideError(f"profile() needs an nn.Module, not a {type(model).__name__}")
        if runner_of(model) is not None:
            raise LowtideError(
                "this model already runs by a plan: call lowtide.remove(model) before profiling it"
            )
        if self.step_in_backward and self.accumulate:
            raise LowtideError(
                "step_in_backward=True updates parameters in every backward pass, and accumulate=True says "
                "that gradients of several are added up: choose one of them"
            )
        if self.step_in_backward and (ranks is not None or units_of(model)):
            raise LowtideError(
                "step_in_backward=True would update parameters before the gradients of all processes are "
                "there: leave it out"
            )
        if self.offload_to is not None and units_of(model):
            raise LowtideError(SHARDED_OFFLOAD)
        if self.offload_to is not None:
            open_store(self.offload_to, str(device_of(model, batch)))
        ddp.check(model)

    def capture(
        self,
        model: nn.Module,
        batch: Any,
        *,
        simulated: SimulatedSharding | None = None,
        gpu: Gpu | None = None,
    ) -> Captured:
        leave()
        with display.shown() as line:
            line.stage("capturing the step")
            return capture(
                ddp.unwrapped(model),
                batch,
                optimizer=join_optimizers(self.optimizer),
                loss=self.loss,
                accumulate=self.accumulate,
                reserve_bytes=self.reserve_bytes,
                step_in_backward=self.step_in_backward,
                holds_outputs=self.holds_outputs,
                simulated=simulated,
                offload=self.offload_to is not None,
                gpu=gpu,
            )

    def with_link(self, step: Step, *, cache: bool = True) -> Step:
        """The step with the transfer speed of its store, if it has one."""
        target = self.offload_to
        return (
            step
            if target is None
            else replace(step, transfer_speed=measure_transfer_speed(target, step, cache))
        )


def profile(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: Optimizers | None = None,
    loss: Loss | None = None,
    accumulate: bool = False,
    reserve: str | int = 0,
    memory_limit: str | int = MEMORY_LIMIT_BYTES,
    cache: bool = True,
    mode: str = "ops",
    step_in_backward: bool = False,
    holds_outputs: bool = True,
    offload: str = "",
    swap: str = "",
    ranks: int | None = None,
    shard: str = "fsdp2",
    device: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    process_group: ProcessGroup | None = None,
) -> Profile:
    """Capture one training step and measure its ops, without running the step.

    `batch`: a tensor or tuple (positional arguments) or a dict (keyword arguments). `optimizer`: one, or a
    list of optimizers that step one after the other. `loss`: a function of the model's output; without it the
    output's `.loss`, a scalar output, or the sum of its floating tensors. `accumulate`: gradients of earlier
    micro-batches are live when the step begins, as in a loop that calls backward() several times before the
    optimizer's step. `reserve`: bytes that are live besides, such as those of another model.

    Ops are timed one at a time, within `memory_limit`, and remembered on disk unless `cache=False`. With
    `mode="run"` the captured graphs run whole instead, which needs the memory of the step. On a terminal, a
    line on stderr shows the progress; `progress(done, total)` is called instead, if given.

    `step_in_backward`: the optimizer updates each parameter as soon as its gradient is final, and frees the
    gradient; `optimizer.step()` stays in the loop. Not for clipping by norm, GradScaler or accumulation.
    `holds_outputs=False`: the loop frees the model's outputs, but for the loss, before backward; by default
    they count until the next forward pass has ended, since the loop gives them a name. `offload`:
    activations may also wait outside of device memory: `"disk:FOLDER"` for a folder on a local disk, whose
    speed is then measured; or `"host"`, the host's memory, where the model is on an accelerator. `swap` is
    the earlier name of `offload`.

    Of a DistributedDataParallel the model inside is profiled, and its buckets are counted; buckets are also
    counted for any other model of a process that is one of several (of `process_group`, by default of all).
    With `ranks`, the step is that of one process among so many, with every block of the model and then the
    model sharded (`fully_shard`): a prediction for which no other process has to run.

    With `device`, the step is one on an absent GPU (`a100-40g`): all figures are estimated from its published
    rates, and marked so. A plan of it applies on that GPU.
    """
    if mode not in MODES:
        raise LowtideError(f"there is no profiling mode '{mode}': choose one of {', '.join(MODES)}")
    gpu = None if device is None else _gpu_named(device)
    training = _Training(
        optimizer=optimizer,
        loss=loss,
        accumulate=accumulate,
        reserve=reserve,
        step_in_backward=step_in_backward,
        holds_outputs=holds_outputs,
        offload=offload_text(offload, swap),
    )
    if gpu is not None and training.offload_to is not None:
        raise LowtideError(
            f"a store is measured where the step runs, and the {gpu.name} is not there: leave offload or "
            "device out"
        )
    limit_bytes = parse_size(memory_limit)
    group = ranks_of(model, process_group)
    training.check(model, batch, group)
    if mode == "run" and (ranks is not None or units_of(model)):
        raise LowtideError(
            "mode 'run' runs whole graphs in one process: profile a sharded model with mode 'ops'"
        )
    if ranks is not None and training.offload_to is not None:
        raise LowtideError(SHARDED_OFFLOAD)
    if gpu is not None and mode == "run":
        raise LowtideError(f"nothing can be run on the {gpu.name}, which is not there: leave mode 'run' out")
    if gpu is not None and any(tensor.device.type != "cpu" for tensor in user_tensors(model, batch)):
        raise LowtideError(
            f"a step is estimated for the {gpu.name} from the CPU: move model and batch there "
            "(`model.cpu()`), or leave `device` out to measure where they are"
        )
    backend = None if gpu is None else "nccl"
    simulated = None if ranks is None else simulate_sharding(model, ranks=ranks, shard=shard, backend=backend)
    with display.silenced() if progress else nullcontext(), display.shown() as line:
        captured = training.capture(model, batch, simulated=simulated, gpu=gpu)
        loop = training.loop(model, batch)
        line.stage("measuring its ops")
        count = progress or line.count
        if gpu is not None:
            step = count_buckets(estimated_costs(captured, gpu), model, group)
            return Profile(step, loop=loop, lever_search=_lever_search(captured, gpu, model, group))
        if mode == "run":
            tensors = user_tensors(model, batch)
            step, known = run_costs(
                captured, tensors, memory_limit_bytes=limit_bytes, use_cache=cache, progress=count
            )
        else:
            step, known = measure_costs(
                captured, memory_limit_bytes=limit_bytes, use_cache=cache, progress=count
            )
        step = training.with_link(step, cache=cache)
    return Profile(
        count_buckets(step, model, group),
        known,
        loop=loop,
        traced=captured.traced,
        lever_search=_lever_search(captured, known, model, group),
    )


def _lever_search(
    captured: Captured, known: KnownCosts | Gpu, model: nn.Module, ranks: Ranks | None
) -> LeverSearch | None:
    """What finds levers of a captured step with known costs, or with those of an absent GPU."""
    is_absent = isinstance(known, Gpu)

    def cost(other: Captured) -> Step:
        return estimated_costs(other, known) if isinstance(known, Gpu) else estimate_costs(other, known)

    def count(step: Step, alive: nn.Module) -> Step:
        return count_buckets(step, alive, ranks)

    return lever_search(captured, model, cost, count, one_process=ranks is None, stores=not is_absent)


def _gpu_named(name: str) -> Gpu:
    found = GPUS.get(name.lower())
    if found is None:
        raise LowtideError(f"no GPU called '{name}' is known here: choose one of {', '.join(sorted(GPUS))}")
    return found


def checkpoint(
    model: nn.Module,
    batch: Any,
    *,
    budget: str | int,
    optimizer: Optimizers | None = None,
    loss: Loss | None = None,
    accumulate: bool = False,
    reserve: str | int = 0,
    planner: str = "auto",
    step_in_backward: bool = False,
    holds_outputs: bool = True,
    offload: str = "",
    swap: str = "",
    executor: str = "eager",
    process_group: ProcessGroup | None = None,
) -> nn.Module:
    """Let `model` train with a peak of at most `budget` bytes: profile, plan and apply in one.

    Returns the same module. A budget that cannot be met raises `BudgetTooSmall` and changes nothing.
    `accumulate`, `reserve`, `step_in_backward`, `holds_outputs` and `offload` are those of `profile`,
    `budget` and `executor` are those of `Profile.plan`; where several processes share a machine's memory,
    `"auto"` is the share of one. One line says what to expect, to the logger `lowtide` at level INFO,
    or to stderr where that shows nothing; `lowtide.plan_of(model)` is the plan.

    `model` may be a DistributedDataParallel, or become one later, or be sharded by `fully_shard`. Where
    several processes train the model (those of `process_group`, by default of the wrapper's or the shards',
    or all), each has to call this: rank 0 makes the plan for all ranks with batches like its own. A setting
    that differs between ranks is an error on all of them.
    """
    training = _Training(
        optimizer=optimizer,
        loss=loss,
        accumulate=accumulate,
        reserve=reserve,
        step_in_backward=step_in_backward,
        holds_outputs=holds_outputs,
        offload=offload_text(offload, swap),
    )
    executor_named(executor)  # checked before the model is captured
    ranks = ranks_of(model, process_group)

    def capture_step() -> Captured:
        training.check(model, batch, ranks)
        return training.capture(model, batch)

    def memory_here() -> dict[str, Any] | None:
        if not is_auto(budget):
            return None
        return free_memory(str(device_of(model, batch)), training.loop(model, batch)).to_dict()

    with display.shown() as line:

        def make(captured: Captured, memories: list[dict[str, Any] | None]) -> Plan:
            line.stage("measuring its ops")
            step, known = measure_costs(captured, progress=line.count)
            step = count_buckets(training.with_link(step), model, ranks)
            line.stage("planning")
            found = Profile(
                step,
                known,
                loop=training.loop(model, batch),
                traced=captured.traced,
                lever_search=_lever_search(captured, known, model, ranks),
            )
            told = [FreeMemory(**memory) for memory in memories if memory is not None]
            if not told:
                return found.plan(budget, planner, executor=executor)
            auto = auto_budget(told)
            return with_note(found.plan(auto.text(budget), planner, executor=executor), auto.line)

        if ranks is None:
            captured = capture_step()
            plan = make(captured, [memory_here()])
        else:
            plan = plan_together(
                ranks,
                capture=capture_step,
                settings=[
                    ("budget", str(budget)),
                    ("planner", planner),
                    ("executor", executor),
                    *training.settings,
                ],
                memory=memory_here,
                make=make,
                loop=lambda: training.loop(model, batch),
            )
    applied = plan.apply(model, process_group=process_group)
    if ranks is None or ranks.rank == 0:
        if is_auto(budget):
            say(plan.solution.notes[-1])
        say(expectation(plan))
    return applied


def verify(
    model: nn.Module,
    batch: Any,
    plan: Plan,
    *,
    optimizer: Optimizers | None = None,
    loss: Loss | None = None,
    timed_runs: int | None = None,
) -> Verification:
    """Compare training with and without `plan` to the last bit, and measure both peaks and times.

    Works on copies in fresh processes; the model here is not trained. Where the model cannot be sent
    to another process, copies in this one are used and `fresh_process` is False. Steps of both are timed in
    turn until the noise of the time added is below two points or half a minute is spent; `timed_runs` is an
    exact number of them instead, 0 for none. Of a
    DistributedDataParallel the model inside is verified, in one process and without buckets. Called inside of
    a block of autocast, every forward pass that is compared runs in such a block.
    """
    with _copyable(model, batch, optimizer, loss) as target:
        return verify_target(target, plan, timed_runs=timed_runs)


def measure_step(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: Optimizers | None = None,
    loss: Loss | None = None,
    plan: Plan | None = None,
    timed_runs: int = 0,
) -> Measured:
    """The true peak of one training step, and its time, without or with a `plan`.

    Works on copies in fresh processes, as `verify` does, and compares nothing. Where the model cannot be sent
    to another process, a copy in this one is measured, by torch's own count of bytes alone and without a
    clock: `resident_peak_bytes` and `timing` are None then.
    """
    with _copyable(model, batch, optimizer, loss) as target:
        try:
            if plan is None:
                return measure_target(target, timed_runs=timed_runs)
            return measure_plan(target, plan, timed_runs=timed_runs)
        except CannotMoveToFreshProcess:
            return measure_here(
                target,
                prepare=None if plan is None else partial(planned, solution=solution_to_dict(plan.solution)),
            )


@contextmanager
def _copyable(
    model: nn.Module, batch: Any, optimizer: Optimizers | None, loss: Loss | None
) -> Iterator[Target]:
    """The target without its plan, for fresh processes; afterwards the model has its plan again."""
    model = ddp.unwrapped(model)
    if units_of(model):
        raise LowtideError(
            "a sharded model cannot be copied into a fresh process: verify the model before fully_shard, or "
            "train the sharded one with and without its plan and compare"
        )
    refuse_other_arguments(model, *split_batch(batch))
    applied, device = runner_of(model), device_of(model, batch)
    target = Target(
        type(model).__name__, model, batch, join_optimizers(optimizer), loss, within=autocast_here(device)
    )
    remove(model)
    try:
        with outside_autocast():
            yield target
    finally:
        if applied is not None:
            attach(model, applied)
