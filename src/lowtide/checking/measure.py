"""Measure one training step: its peak by two methods, and its time, each in a process of its own."""

import copy
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lowtide.checking.clock import Timing, time_steps
from lowtide.checking.fresh import run_fresh
from lowtide.checking.peak import (
    RESIDENT_ENVIRONMENT,
    can_measure_resident,
    peak_and_op,
    resident_peak,
)
from lowtide.checking.train_step import device_of, static_bytes, train_step
from lowtide.zoo.targets import Target, TargetSpec

WARM_UP_STEPS = 2
"""The first makes the optimizer's state and all that torch allocates only once; a compiled model also
does so in the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Peaks count everything that torch holds: `static_bytes` (parameters, buffers, batch, optimizer
    state) plus what the step adds on top. `resident_peak_bytes` is None where it cannot be measured:
    on a GPU, outside Linux, or not in a fresh process. `timing` is None when no runs were asked for.
    `peak_op` ran at the peak, by torch's own name; empty where nobody knows.
    """

    peak_bytes: int
    resident_peak_bytes: int | None
    static_bytes: int
    with_optimizer: bool
    fresh_process: bool
    timing: Timing | None = None
    peak_op: str = ""


def measure_step(
    source: TargetSpec | Target,
    *,
    with_optimizer: bool = True,
    prepare: str | None = None,
    payload: Mapping[str, Any] | None = None,
    timed_runs: int = 0,
    resident: bool = True,
) -> Measured:
    """Measure a step of `source` in fresh processes; nothing here is touched.

    Without `resident`, memory is measured by torch's own count alone, in about half of the time.

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
        "lowtide.checking.measure:measure_memory", environment=environment, resident=resident, **arguments
    )
    if not timed_runs:
        return measured
    timing: Timing = run_fresh("lowtide.checking.measure:measure_time", runs=timed_runs, **arguments)
    return replace(measured, timing=timing)


def measure_here(
    target: Target, *, with_optimizer: bool = True, prepare: Callable[[Target], Target] | None = None
) -> Measured:
    """Measure a copy of a live target in this process: by torch's own count only.

    For models that cannot be sent to another process. Needs memory for a second copy of the model.
    `prepare` is called with that copy and returns the target to measure.
    """
    model, batch, optimizer = copy.deepcopy((target.model, target.batch, target.optimizer))
    double = replace(target, model=model, batch=batch, optimizer=optimizer if with_optimizer else None)
    with torch.random.fork_rng():
        return _measure(prepare(double) if prepare is not None else double, resident=False)


def measure_memory(
    *,
    source: TargetSpec | Target,
    with_optimizer: bool,
    prepare: str | None,
    payload: dict[str, Any],
    resident: bool,
) -> Measured:
    """The child's job: both peaks, the resident one first, since the profiler leaves traces behind."""
    target = _load(source, with_optimizer, prepare, payload)
    return replace(_measure(target, resident=resident and can_measure_resident()), fresh_process=True)


def measure_time(
    *,
    source: TargetSpec | Target,
    with_optimizer: bool,
    prepare: str | None,
    payload: dict[str, Any],
    runs: int,
) -> Timing:
    """The child's job: the clock alone, with the allocator as users have it."""
    target = _load(source, with_optimizer, prepare, payload)
    device = device_of(target.model, target.batch)
    return time_steps({"step": lambda: _step(target)}, device=device, runs=runs)["step"]


def _load(
    source: TargetSpec | Target, with_optimizer: bool, prepare: str | None, payload: dict[str, Any]
) -> Target:
    target = source.load() if isinstance(source, TargetSpec) else source
    if not with_optimizer:
        target = replace(target, optimizer=None)
    if prepare is not None:
        module, _, name = prepare.partition(":")
        target = getattr(importlib.import_module(module), name)(target, **payload)
        assert isinstance(target, Target), f"{prepare} must return a Target"
    return target


def _measure(target: Target, *, resident: bool) -> Measured:
    target.model.zero_grad(set_to_none=True)
    for _ in range(WARM_UP_STEPS):
        _step(target)
    device = device_of(target.model, target.batch)
    above = resident_peak(lambda: _step(target)) if resident and device.type == "cpu" else None
    peak, op = peak_and_op(lambda: _step(target), device=device)
    static = static_bytes(target.model, target.batch, target.optimizer)
    return Measured(
        peak_bytes=static + peak,
        resident_peak_bytes=None if above is None else static + above,
        static_bytes=static,
        with_optimizer=target.optimizer is not None,
        fresh_process=False,
        peak_op=op,
    )


def _step(target: Target) -> None:
    train_step(
        target.model,
        target.batch,
        target.optimizer,
        target.loss,
        holds_outputs=target.holds_outputs,
        within=target.within,
    )
