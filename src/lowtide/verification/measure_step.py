"""One training step: the canonical step itself, its peak by two methods, and its time.

`measure_step` measures in fresh processes, memory and time apart, since the first disturbs the second.
Every run is timed alone, synchronized, after a warm-up.

A peak is the largest number of bytes live while a function runs, above those live when it started. torch has
no statistics of its CPU allocator. Two independent methods measure the peak, and they should agree: torch's
profiler counts every block that torch allocates; the kernel counts the resident high-water mark of the
process. On an accelerator the allocator itself counts the peak. In a fresh process, all blocks are the
step's: those that were live when it started count too, such as workspaces that libraries keep.
"""

import copy
import gc
import importlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, repeat
from typing import Any

import torch
from torch import nn

from lowtide.facts.host_memory import HIGH_WATER, reset_resident_peak, resident_peak_bytes, status_bytes
from lowtide.generators import generators_kept
from lowtide.offload.offload_store import resting_of
from lowtide.ops.device_memory import bytes_of_storages, common_device
from lowtide.profiling.devices import device_for, page_fault_seconds, page_faults
from lowtide.report.style import QUIET
from lowtide.trace.model_call import Loss, call, loss_of, tensors_in
from lowtide.trace.step_device import device_of, devices_of
from lowtide.verification.fresh_process import run_fresh
from lowtide.zoo.targets import Target, TargetSpec


def train_step(
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Loss | None = None,
    *,
    holds_outputs: bool = True,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> torch.Tensor:
    """Forward, loss, backward, optimizer step, gradients dropped. Returns the loss, detached.

    See `train_steps`.
    """
    return train_steps(model, batch, optimizer, loss, steps=1, holds_outputs=holds_outputs, within=within)


STEPS_IN_LOOP = 2
"""A step begins with the outputs of the last one."""


def train_steps(
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Loss | None = None,
    *,
    steps: int = STEPS_IN_LOOP,
    holds_outputs: bool = True,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> torch.Tensor:
    """The canonical loop; returns the last loss, detached.

    `holds_outputs`: the model's output stays live until the next call has returned another, as in every loop
    that gives it a name. Forward pass and loss run inside of the context `within()`. Gradients must be None
    at the start. A dict is passed as keywords, a tuple or list as positional arguments.
    """
    for _ in range(steps):
        with within():
            output = call(model, batch)
            value = loss_of(output, loss)
        if not holds_outputs:
            del output
        value.backward()  # type: ignore[no-untyped-call]
        # the number alone: `mse_loss` gives one in a block as large as its input, counted in this step
        value = value.detach().clone()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        model.zero_grad(set_to_none=True)
    return value


def autocast_here(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """A function that makes an autocast context like the current one, for each forward pass."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext
    dtype, cached = torch.get_autocast_dtype(device.type), torch.is_autocast_cache_enabled()
    return partial(torch.autocast, device.type, dtype, cache_enabled=cached)


def static_bytes(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Bytes that this process has of parameters, buffers, batch and optimizer state on the step's device.

    Shared memory counts once, and what rests on a store not at all. On an accelerator, the blocks of its
    allocator count.
    """
    state = list(optimizer.state.values()) if optimizer is not None else []
    tensors = list(tensors_in([list(model.parameters()), list(model.buffers()), batch, state]))
    device = common_device(tensors)
    return bytes_of_storages(device, [tensor for tensor in tensors if resting_of(tensor) is None])


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of each timed run, in the order they ran.

    On a CPU, `page_faults` are the faults of each run, and `page_fault_seconds` is the measured time of one
    fault.
    """

    runs: tuple[float, ...]
    page_faults: tuple[int, ...] = ()
    page_fault_seconds: float = 0.0

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.runs)

    @property
    def spread_seconds(self) -> float:
        """The distance between the first and the third quartile."""
        if len(self.runs) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.runs, n=4, method="inclusive")
        return high - low

    @property
    def median_page_faults(self) -> int:
        return round(statistics.median(self.page_faults)) if self.page_faults else 0

    @property
    def fault_share(self) -> float:
        """About the share of the time in page faults."""
        return self.median_page_faults * self.page_fault_seconds / self.median_seconds

    def added_to(self, baseline: "Timing") -> float:
        """The share of `baseline`'s time that this adds, from the two medians."""
        return self.median_seconds / baseline.median_seconds - 1

    def noise_beside(self, baseline: "Timing") -> float | None:
        """The uncertainty of `added_to`; None for a single run.

        Consecutive runs are compared, since a slow phase of the machine hits both of a pair: the half-width
        of the 95 % interval of the median of their ratios (the notch of a box plot: McGill, Tukey and
        Larsen 1978), which more pairs make smaller, plus the distance of that median from `added_to`.
        """
        if len(self.runs) < 2:
            return None
        ratios = Timing(tuple(mine / other for mine, other in zip(self.runs, baseline.runs, strict=True)))
        notch = NOTCH * ratios.spread_seconds / math.sqrt(len(ratios.runs))
        return notch + abs(ratios.median_seconds - 1 - self.added_to(baseline))


NOTCH = 1.57
"""Half the 95 % interval of a median, in units of the distance between the quartiles over the root of the
number of values."""
LEAST_PAIRS, USUAL_PAIRS = 3, 5
"""Fewer pairs of runs tell nothing; fewer than usual may look quiet by chance."""
MOST_SECONDS = 30.0
"""The time for more pairs of runs where the noise is not yet small."""


def time_steps(
    steps: Mapping[str, Callable[[], object]],
    *,
    device: torch.device,
    warm_up: int = 1,
    runs: int | None = 5,
    most_seconds: float = MOST_SECONDS,
) -> dict[str, Timing]:
    """Time several steps in turn (a, b, a, b, ...), so that a slow phase of the machine hits all alike.

    `runs` None: until the noise of each step beside the first is at most `QUIET`, or `most_seconds` are
    spent.
    """
    for _ in range(warm_up):
        for step in steps.values():
            step()
    clock = device_for(device)
    on_cpu = device.type == "cpu"
    fault_seconds = page_fault_seconds() if on_cpu else 0.0
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    faults: dict[str, list[int]] = {name: [] for name in steps}
    for _ in _rounds(seconds, runs, most_seconds):
        for name, step in steps.items():
            before = page_faults()
            seconds[name].append(clock.timed(step)[1].seconds)
            if on_cpu:
                faults[name].append(page_faults() - before)
    return {name: Timing(tuple(seconds[name]), tuple(faults[name]), fault_seconds) for name in steps}


def _rounds(seconds: Mapping[str, Sequence[float]], runs: int | None, most_seconds: float) -> Iterator[None]:
    """One item per round of runs, whose times are in `seconds` before the next is asked for.

    The noise is looked at after every tenth more of the rounds: looked at after each, it would be small by
    chance sooner.
    """
    if runs is not None:
        yield from repeat(None, runs)
        return
    begin, look_at = time.perf_counter(), USUAL_PAIRS
    for done in count():
        if done >= LEAST_PAIRS and time.perf_counter() - begin >= most_seconds:
            return
        if done >= look_at:
            first, *others = (Timing(tuple(timed)) for timed in seconds.values())
            if all((each.noise_beside(first) or 0.0) <= QUIET for each in others):
                return
            look_at = done + 1 + done // 10
        yield


WARM_UP_STEPS = 2
"""The first step makes the optimizer's state and the one-time allocations of torch; a compiled model has
some more in the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Peaks count all bytes that torch has live: `static_bytes` (parameters, buffers, batch, optimizer
    state) plus the bytes that the step adds. `resident_peak_bytes` is None where it cannot be measured:
    on an accelerator, outside Linux, or not in a fresh process. `timing` is None when no runs were asked for.
    `peak_op` ran at the peak, by torch's own name; empty where that is unknown. `reserved_peak_bytes` is the
    most that the allocator of an accelerator reserved in the fresh process, from its start; None on a CPU.
    """

    peak_bytes: int
    resident_peak_bytes: int | None
    static_bytes: int
    with_optimizer: bool
    fresh_process: bool
    timing: Timing | None = None
    peak_op: str = ""
    reserved_peak_bytes: int | None = None


def measure_step(
    source: TargetSpec | Target,
    *,
    with_optimizer: bool = True,
    prepare: str | None = None,
    payload: Mapping[str, Any] | None = None,
    timed_runs: int | None = 0,
    resident: bool = True,
) -> Measured:
    """Measure a step of `source` in fresh processes; this process does not change it.

    Without `resident`, memory is measured by torch's own count alone, in about half of the time.
    `timed_runs` None: the usual number, since a step alone has no partner to tell its noise by.

    A `TargetSpec` is loaded there; the live objects of a `Target` are sent, which raises
    `CannotMoveToFreshProcess` where they cannot be (see `measure_here`).
    `prepare`, written `module:function`, is called there as `function(target, **payload)` before
    anything is measured and returns the `Target` to measure.
    """
    arguments: dict[str, Any] = {
        "source": source,
        "with_optimizer": with_optimizer,
        "prepare": prepare,
        "payload": dict(payload or {}),
    }
    environment = RESIDENT_ENVIRONMENT if resident else None
    measured: Measured = run_fresh(
        "lowtide.verification.measure_step:measure_memory",
        environment=environment,
        resident=resident,
        **arguments,
    )
    if timed_runs == 0:
        return measured
    runs = USUAL_PAIRS if timed_runs is None else timed_runs
    timing: Timing = run_fresh("lowtide.verification.measure_step:measure_time", runs=runs, **arguments)
    return replace(measured, timing=timing)


def measure_here(
    target: Target, *, with_optimizer: bool = True, prepare: Callable[[Target], Target] | None = None
) -> Measured:
    """Measure a copy of a live target in this process: by torch's own count only.

    For models that cannot be sent to another process. Needs memory for a second copy of the model.
    `prepare` is called with that copy and returns the target to measure.
    """
    model, batch, optimizer = copy.deepcopy((target.model, target.batch, target.optimizer))
    copied = replace(target, model=model, batch=batch, optimizer=optimizer if with_optimizer else None)
    with generators_kept(devices_of(target.model, target.batch)):
        return _measure(prepare(copied) if prepare is not None else copied, resident=False)


def measure_memory(*, resident: bool, **arguments: Any) -> Measured:
    """The child's job: both peaks, the resident one first, since the profiler allocates memory."""
    target = _load(**arguments)
    return _measure(target, resident=resident and can_measure_resident(), fresh_process=True)


def measure_time(*, runs: int, **arguments: Any) -> Timing:
    """The child's job: times, with the default allocator."""
    target = _load(**arguments)
    device = device_of(target.model, target.batch)
    return time_steps({"step": lambda: _step(target)}, device=device, runs=runs)["step"]


def _load(
    *, source: TargetSpec | Target, with_optimizer: bool, prepare: str | None, payload: dict[str, Any]
) -> Target:
    target = source.load() if isinstance(source, TargetSpec) else source
    if not with_optimizer:
        target = replace(target, optimizer=None)
    if prepare is not None:
        module, _, name = prepare.partition(":")
        target = getattr(importlib.import_module(module), name)(target, **payload)
        assert isinstance(target, Target), f"{prepare} must return a Target"
    return target


def _measure(target: Target, *, resident: bool, fresh_process: bool = False) -> Measured:
    target.model.zero_grad(set_to_none=True)
    for _ in range(WARM_UP_STEPS):
        _step(target)
    device = device_of(target.model, target.batch)
    steps = STEPS_IN_LOOP if target.holds_outputs else 1
    above = resident_peak(lambda: _step(target, steps)) if resident and device.type == "cpu" else None
    gc.collect()
    before = device_for(device).live_bytes() if fresh_process else None
    peak, op = peak_and_op(lambda: _step(target, steps), device=device)
    static = static_bytes(target.model, target.batch, target.optimizer)
    return Measured(
        peak_bytes=(static if before is None else before) + peak,
        resident_peak_bytes=None if above is None else static + above,
        static_bytes=static,
        with_optimizer=target.optimizer is not None,
        fresh_process=fresh_process,
        peak_op=op,
        reserved_peak_bytes=device_for(device).reserved_peak_bytes() if fresh_process else None,
    )


def _step(target: Target, steps: int = 1) -> None:
    train_steps(
        target.model,
        target.batch,
        target.optimizer,
        target.loss,
        steps=steps,
        holds_outputs=target.holds_outputs,
        within=target.within,
    )


CPU = torch.device("cpu")
RESIDENT_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
"""With these, glibc returns memory to the kernel when it is freed, so that residence follows use."""


def peak_above_start(step: Callable[[], object], *, device: torch.device = CPU) -> int:
    """Peak bytes that torch has live on `device` during `step()`, above those live before it.

    On the CPU, torch's profiler counts. It does not see that an earlier block is freed: the peak of a step
    that frees such blocks is too high. On an accelerator, the allocator counts.
    """
    gc.collect()
    return device_for(device).measured(step)[1]


def peak_and_op(step: Callable[[], object], *, device: torch.device = CPU) -> tuple[int, str]:
    """As `peak_above_start`, with the op that ran at the peak; empty where only the allocator counts."""
    gc.collect()
    return device_for(device).peak_and_op(step)


def can_measure_resident() -> bool:
    """Whether this system reports and resets the resident high-water mark (Linux)."""
    return sys.platform == "linux" and HIGH_WATER.exists()


def resident_peak(step: Callable[[], object]) -> int:
    """Growth of the process's resident high-water mark during `step()`.

    Valid only in a process with `RESIDENT_ENVIRONMENT`, and after a warm-up: one-time allocations of torch
    would count as well.
    """
    gc.collect()
    reset_resident_peak()
    before = status_bytes("VmRSS")
    assert before is not None, "a system without it is not measured so"
    step()
    return resident_peak_bytes() - before
