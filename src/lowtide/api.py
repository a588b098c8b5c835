"""The functions of the library: profile, plan, apply, verify."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from lowtide import display
from lowtide.analyze.captured_step import Captured
from lowtide.errors import CannotMoveToFreshProcess, LowtideError
from lowtide.facts import Step
from lowtide.facts.auto_budget import FreeMemory, auto_budget
from lowtide.facts.gpus import GPUS, Gpu
from lowtide.facts.plan import offload_text, parse_offload_what, parse_rounds
from lowtide.facts.serial import solution_to_dict
from lowtide.facts.sizes import is_auto, parse_size
from lowtide.lever_search import LeverSearch, lever_search
from lowtide.loop_statements import SHARDED_OFFLOAD, LoopStatements
from lowtide.optim.joined_optimizers import join_optimizers
from lowtide.parallel.ranks import Ranks, count_buckets, plan_together, ranks_of
from lowtide.parallel.simulated_sharding import simulate_sharding
from lowtide.plans import Plan, expectation, with_note
from lowtide.profiles import Profile
from lowtide.profiling.costing import MEMORY_LIMIT_BYTES, KnownCosts, estimate_costs, measure_costs
from lowtide.profiling.free_memory import free_memory
from lowtide.profiling.roofline import estimated_costs
from lowtide.profiling.whole_run import run_costs
from lowtide.runtime.executor import executor_named
from lowtide.runtime.runner import attach, remove, runner_of
from lowtide.stage_log import say
from lowtide.torch_compat import ddp
from lowtide.torch_compat.autograd_engine import outside_autocast
from lowtide.torch_compat.dtensor import is_divided
from lowtide.trace.batch_arguments import refuse_other_arguments
from lowtide.trace.identity import user_tensors
from lowtide.trace.model_call import Loss, Optimizers, split_batch
from lowtide.trace.step_device import device_of
from lowtide.verification.comparison import planned
from lowtide.verification.measure_step import Measured, autocast_here, measure_here
from lowtide.verification.measure_step import measure_step as measure_target
from lowtide.verification.verify_plan import Verification, measure_plan
from lowtide.verification.verify_plan import verify as verify_target
from lowtide.verification.verify_sharded import verify_sharded
from lowtide.zoo.targets import Target

MODES = ("ops", "run")


def profile(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: Optimizers | None = None,
    loss: Loss | None = None,
    accumulate: bool = False,
    calls: int = 1,
    pipeline: Any = None,
    reserve: str | int = 0,
    memory_limit: str | int = MEMORY_LIMIT_BYTES,
    cache: bool = True,
    mode: str = "ops",
    step_in_backward: bool = False,
    holds_outputs: bool = True,
    offload: str = "",
    offload_what: str | Iterable[str] = ("activations",),
    rounds: str | Iterable[str] = (),
    swap: str = "",
    ranks: int | None = None,
    shard: str = "fsdp2",
    device: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    process_group: ProcessGroup | None = None,
) -> Profile:
    """Capture one training step and measure its ops, without running the step.

    Args:
        model: The module that the loop calls. Of a DistributedDataParallel the model inside is profiled, and
            its buckets are counted; buckets are also counted for any other model of a process that is one of
            several.
        batch: What the model is called with: a tensor or a tuple (positional arguments), or a dict (keyword
            arguments). Labels that the model does not take belong into `loss`.
        optimizer: One, or a list of optimizers that step one after the other.
        loss: A function of the model's output, for the memory of the loss. Without it: the output's `.loss`,
            a scalar output, or the sum of its floating tensors.
        accumulate: Gradients of earlier micro-batches are live when the step begins, as in a loop that calls
            backward() several times before the optimizer's step.
        calls: How often a step calls the model before its first backward pass: the views of a contrastive
            loss, say. `batch` is that of one call.
        pipeline: A schedule of `torch.distributed.pipelining` that has `model` as a stage. It says how many
            micro-batches are in flight, whether gradients accumulate, and what the pipeline itself keeps live
            for them. `batch` is one micro-batch, and `loss` belongs to the last stage alone. The stage is
            planned by itself, unless `process_group` names the processes that train it.
        reserve: Bytes that are live besides, such as those of another model.
        memory_limit: Bytes that measuring may take; larger ops are scaled from smaller ones.
        cache: Remember the times of ops on disk.
        mode: `"ops"` times each distinct op alone. `"run"` runs the captured graphs whole, which needs the
            memory of the step.
        step_in_backward: The optimizer updates each parameter as soon as its gradient is final, and frees the
            gradient; `optimizer.step()` stays in the loop. Not for clipping by norm, GradScaler or
            accumulation.
        holds_outputs: Whether the loop keeps the model's outputs besides the loss, until the next forward
            pass has ended: it does where they have a name. `False`: they are freed before backward.
        offload: Activations, or `offload_what`, may wait outside of device memory: `"disk:FOLDER"`, a local
            disk, whose speed is then measured; or `"host"`, the host's memory, for a model on an accelerator.
        offload_what: What may wait there, one or several of `"activations"`, `"state"` (the optimizer's),
            `"frozen"` (weights that are not trained) and `"parameters"`.
        rounds: What may run with other bits than eager's: `"head"`, a language model's linear layer with its
            cross entropy or log-probabilities, in chunks of rows. Plans use it only where it helps; all
            others stay exact.
        swap: The earlier name of `offload`.
        ranks: The step is that of one process among so many, with every block of the model and then the model
            sharded (`fully_shard`): a prediction for which no other process has to run.
        shard: How `ranks` share parameters.
        device: The name of an absent GPU (`"a100-40g"`): all figures are estimated from its published rates,
            and marked so. A plan of it applies on that GPU.
        progress: Called with the numbers of finished and of all measurements, in place of the line on stderr
            that a terminal shows.
        process_group: The processes that train this model; by default all.
    """
    if mode not in MODES:
        raise LowtideError(f"there is no profiling mode '{mode}': choose one of {', '.join(MODES)}")
    gpu = None if device is None else _gpu_named(device)
    store = offload_text(offload, swap)
    training = LoopStatements(
        optimizer=optimizer,
        loss=loss,
        accumulate=accumulate,
        calls=calls,
        reserve=reserve,
        step_in_backward=step_in_backward,
        holds_outputs=holds_outputs,
        offload=store,
        offload_what=parse_offload_what(offload_what, offload=store),
        rounds=parse_rounds(rounds),
    ).of_pipeline(pipeline, model)
    batch = training.received(batch)
    if gpu is not None and training.offload_to is not None:
        raise LowtideError(
            f"a store is measured where the step runs, and the {gpu.name} is not there: leave offload or "
            "device out"
        )
    if training.calls != 1 and ranks is not None:
        raise LowtideError("calls is not predicted for ranks: leave calls or ranks out")
    if training.rounds and (gpu is not None or ranks is not None):
        raise LowtideError(
            "rounds is planned for the device that is here, in one process or in DDP: leave rounds out, or "
            "device and ranks"
        )
    limit_bytes = parse_size(memory_limit)
    group = None if training.is_alone(process_group) else ranks_of(model, process_group)
    training.check(model, batch, group)
    if mode == "run" and (ranks is not None or is_divided(model)):
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
        loop = training.loop(model, batch, captured.step)
        line.stage("measuring its ops")
        count = progress or line.count
        if gpu is not None:
            step = count_buckets(estimated_costs(captured, gpu), model, group)
            return Profile.of(step, loop=loop, lever_search=_lever_search(captured, gpu, model, group))
        if mode == "run":
            tensors = user_tensors(model, batch)
            step, known = run_costs(
                captured, tensors, memory_limit_bytes=limit_bytes, use_cache=cache, progress=count
            )
        else:
            step, known = measure_costs(
                captured, memory_limit_bytes=limit_bytes, use_cache=cache, progress=count
            )
        step, other = training.with_rounding(training.with_link(step, cache=cache), captured, known)
    return Profile.of(
        count_buckets(step, model, group),
        known=known,
        rounded=None if other is None else count_buckets(other, model, group),
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
    calls: int = 1,
    pipeline: Any = None,
    reserve: str | int = 0,
    planner: str = "auto",
    step_in_backward: bool = False,
    holds_outputs: bool = True,
    offload: str = "",
    offload_what: str | Iterable[str] = ("activations",),
    rounds: str | Iterable[str] = (),
    swap: str = "",
    executor: str = "eager",
    process_group: ProcessGroup | None = None,
) -> nn.Module:
    """Let `model` train with a peak of at most `budget` bytes: profile, plan and apply in one.

    Returns the same module. A budget that cannot be met raises `BudgetTooSmall` and changes nothing. One line
    says what to expect, to the logger `lowtide` at level INFO, or to stderr where that shows nothing;
    `lowtide.plan_of(model)` is the plan.

    Where several processes train the model, each has to call this: rank 0 makes the plan for all ranks with
    batches like its own. A setting that differs between ranks is an error on all of them.

    Args:
        model: A module; it may be a DistributedDataParallel, or become one later, or be sharded by
            `fully_shard`.
        batch: What the model is called with, as for `profile`.
        budget: Bytes, a size (`"8GiB"`), a share of the baseline's peak (`"60%"`), or `"auto"`: what the
            device has free, and where several processes share a machine's memory the share of one.
        optimizer: One, or a list of optimizers that step one after the other.
        loss: A function of the model's output, for the memory of the loss, as for `profile`.
        accumulate: Gradients of earlier micro-batches are live when the step begins.
        calls: How often a step calls the model before its first backward pass, as for `profile`.
        pipeline: The schedule of a pipeline that has `model` as a stage, as for `profile`.
        reserve: Bytes that are live besides, such as those of another model.
        planner: The name of a planner, as for `Profile.plan`.
        step_in_backward: The optimizer updates each parameter as soon as its gradient is final, as for
            `profile`.
        holds_outputs: Whether the loop keeps the model's outputs besides the loss, as for `profile`.
        offload: `"disk:FOLDER"` or `"host"`: activations may also wait there, as for `profile`.
        offload_what: What may wait there, as for `profile`.
        rounds: What may run with other bits than eager's, as for `profile`.
        swap: The earlier name of `offload`.
        executor: `"eager"` runs a plan op by op, `"inductor"` compiles it.
        process_group: The processes that train this model; by default those of the wrapper or the shards, or
            all.
    """
    store = offload_text(offload, swap)
    training = LoopStatements(
        optimizer=optimizer,
        loss=loss,
        accumulate=accumulate,
        calls=calls,
        reserve=reserve,
        step_in_backward=step_in_backward,
        holds_outputs=holds_outputs,
        offload=store,
        offload_what=parse_offload_what(offload_what, offload=store),
        rounds=parse_rounds(rounds),
    ).of_pipeline(pipeline, model)
    batch = training.received(batch)
    executor_named(executor)  # checked before the model is captured
    ranks = None if training.is_alone(process_group) else ranks_of(model, process_group)

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
            step, other = training.with_rounding(training.with_link(step), captured, known)
            line.stage("planning")
            found = Profile.of(
                count_buckets(step, model, ranks),
                known=known,
                rounded=None if other is None else count_buckets(other, model, ranks),
                loop=training.loop(model, batch, captured.step),
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
    process_group: ProcessGroup | None = None,
) -> Verification:
    """Compare training with and without `plan` to the last bit, and measure both peaks and times.

    Works on copies in fresh processes; the model here is not trained. Where the model cannot be sent to
    another process, copies in this one are used and `fresh_process` is False. Of a DistributedDataParallel
    the model inside is verified, in one process and without buckets. Called inside of a block of autocast,
    every forward pass that is compared runs in such a block.

    A model that is divided among processes (`fully_shard`, `parallelize_module`) trains here, since it can be
    neither copied nor sent, and has its state back afterwards. Every process has to call this, and gets the
    verdict of all: a difference on one of them is a difference, and the highest peak counts.

    Args:
        model: The module that was profiled.
        batch: What the model is called with, as for `profile`.
        plan: A plan of this step.
        optimizer: That of the step, as for `profile`.
        loss: That of the step, as for `profile`.
        timed_runs: An exact number of steps to time, in turn without and with the plan; 0 for none. Without
            it, steps are timed until the noise of the time added is below two points or half a minute is
            spent; for a model that is divided among processes, five times each.
        process_group: The processes of a divided model, as for `profile`.
    """
    _check_one_call(plan)
    if is_divided(model):
        group = ranks_of(model, process_group)
        with _without_plan(model, batch, optimizer, loss) as target:
            return verify_sharded(target, plan, ranks=group, timed_runs=timed_runs)
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

    Args:
        model: The module that the loop calls.
        batch: What the model is called with, as for `profile`.
        optimizer: That of the step, as for `profile`.
        loss: That of the step, as for `profile`.
        plan: A plan of this step; without it, the step is eager's.
        timed_runs: The number of steps to time.
    """
    if plan is not None:
        _check_one_call(plan)
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


def _check_one_call(plan: Plan) -> None:
    if plan.solution.calls > 1 or plan.solution.pipeline:
        raise LowtideError(
            "a fresh process trains one call of the model for each step, and this plan is for several calls "
            "or for a stage of a pipeline: train with and without the plan and compare"
        )


@contextmanager
def _copyable(
    model: nn.Module, batch: Any, optimizer: Optimizers | None, loss: Loss | None
) -> Iterator[Target]:
    """The target without its plan, for fresh processes; afterwards the model has its plan again."""
    if is_divided(model):
        raise LowtideError(
            "a sharded model cannot be copied into a fresh process, where a step is measured: "
            "lowtide.verify(model, batch, plan) measures it here, with and without a plan"
        )
    with _without_plan(model, batch, optimizer, loss) as target:
        yield target


@contextmanager
def _without_plan(
    model: nn.Module, batch: Any, optimizer: Optimizers | None, loss: Loss | None
) -> Iterator[Target]:
    """The target without its plan; afterwards the model has its plan again."""
    model = ddp.unwrapped(model)
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
