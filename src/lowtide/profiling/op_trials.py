"""One op under measurement: its workspace from one run, its time from runs spread over several rounds.

An op that is too large, or that fails, is measured on a chunk of itself and scaled up:

    work.nbytes   limit/16        limit            whole
                     |  x4   x4     |                |
    chunks run:      c1 -> c2 -> c3 (largest safe)   extrapolated: line through c3 and 0.75 c3
"""

import logging
import statistics
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest

import torch

from lowtide.ops.calls import Call, OpCost
from lowtide.ops.device_memory import CPU, devices_beside_cpu, with_index
from lowtide.ops.schema import is_view
from lowtide.profiling.devices import (
    SLOW_SECONDS,
    Device,
    OpTiming,
    device_for,
    rest_after,
    spread_seconds,
    typical_seconds,
)
from lowtide.profiling.samples import SAMPLE_EXTRA_BYTES, make_sample
from lowtide.profiling.work import SmallerCall, Work, fresh_storages, shrink, work_of

_log = logging.getLogger(__name__)

ROUNDS = 8
_SHORT_SECONDS = 2e-3
_SLOW_ROUNDS = 5
_JITTER_SECONDS = 20e-6
"""An occasional error of any clock; an op as short as that does not matter in a plan."""

_HARMLESS_SHARE = 1 / 16
"""An op of at most this share of the limit runs whole at once: any workspace fits."""
_WORKSPACE_MARGIN = 1.25
"""The factor by which the share of workspace may grow from a chunk to the op."""
_GROWTH = 4
_LEAST_GROWTH = 1.25
"""The largest growth from one chunk to the next, and the least worth a try."""
_FAILING_SHARES = (0.6, 0.3, 0.15)
"""Shares of a failing op that are tried instead."""
_CHUNK_BYTES = 256 << 20
"""The largest chunk of an op that never fits: a larger one takes longer and shows no more."""


class TooLarge(Exception):
    """An op that does not fit and cannot be reduced."""


@dataclass(frozen=True, slots=True)
class OpMemory:
    """Bytes of a call beyond its inputs and fake outputs: workspace, and more in each fresh output."""

    workspace_bytes: int = 0
    hidden_bytes: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.workspace_bytes + sum(self.hidden_bytes)


@dataclass
class Trial:
    """A call under measurement: itself, or a chunk of it whose time `factor` scales up."""

    call: Call
    device: Device
    memory: OpMemory = OpMemory()
    factor: float = 1.0
    estimated: bool = False
    timings: list[OpTiming] = field(default_factory=list)

    @property
    def cost(self) -> OpCost:
        return OpCost(
            typical_seconds(self.timings) * self.factor,
            self.memory.workspace_bytes,
            self.estimated,
            self.memory.hidden_bytes,
        )

    @property
    def settled(self) -> bool:
        return any(not timing.avoidable for timing in self.timings)

    @property
    def noisy(self) -> bool:
        """Whether the time is unreliable: no run was undisturbed, or the runs differ by more than the time of
        one run with its page faults."""
        whole = statistics.median(timing.whole_seconds for timing in self.timings)
        return not self.settled or spread_seconds(self.timings) > max(whole, _JITTER_SECONDS)

    def time(self, *, attempts: int) -> None:
        """Time runs until one is undisturbed, at most `attempts`."""
        for attempt in range(attempts):
            if attempt:
                rest_after(self.timings[-1])
            self.timings.append(timed(self.call, self.device))
            if not self.timings[-1].avoidable:
                return

    def takes_part(self, number: int) -> bool:
        """Whether the op runs in this round: short ops in all, slow ones in the first few."""
        last = self.timings[-1].whole_seconds if self.timings else 0.0
        return number <= (_SLOW_ROUNDS if last > SLOW_SECONDS else ROUNDS) and (
            last < _SHORT_SECONDS or number % 2 == 1
        )


def timed(call: Call, device: Device) -> OpTiming:
    """One run on fresh inputs; a separate function, so that no tensor outlives the run."""
    args, kwargs = make_sample(call, fill=not is_view(call))
    return device.timed_in_own_memory(partial(call.target, *args, **kwargs))[1]


def device_of(call: Call) -> Device:
    """The accelerator that a call reads from or writes to, as far as its arguments say; else the CPU."""
    named = call.kwargs.get("device")
    found = devices_beside_cpu(call.tensors) or [CPU if named is None else with_index(torch.device(named))]
    return device_for(found[0])


def start_trial(key: str, call: Call, *, memory_limit_bytes: int) -> Trial:
    """Warm up and measure the workspace, on the whole call or on a chunk that fits.

    For an op that fails: the whole op where only its chunks fail, else the largest chunk that runs, scaled
    up. Raises the error of the op where no chunk runs.
    """
    try:
        return _start(call, memory_limit_bytes=memory_limit_bytes)
    except TooLarge:
        raise
    except Exception as error:
        work, device = work_of(call), device_of(call)
        if 2 * work.nbytes <= memory_limit_bytes - SAMPLE_EXTRA_BYTES:
            with suppress(Exception):
                return Trial(call, device, memory_of(call, work, device))
        for share in _FAILING_SHARES:
            part = shrink(call, work, limit_bytes=int(work.nbytes * share))
            if part is None or not part.reduced:
                break
            with suppress(Exception):
                memory = memory_of(part.call, part.work, device)
                _log.warning("costed by a chunk, since the op fails alone: %s: %s", key, in_one_line(error))
                return _scaled_trial(work, part, _extrapolated(work, part, memory, part, memory), device)
        raise


def _start(call: Call, *, memory_limit_bytes: int) -> Trial:
    device, limit = device_of(call), memory_limit_bytes - SAMPLE_EXTRA_BYTES
    work = work_of(call)
    if is_view(call) and work.nbytes <= limit:
        return Trial(call, device)
    if is_view(call):
        # A view costs its dispatch, whatever its size.
        tiny = Call(torch.ops.aten.detach.default, (torch.empty(1, device=device.torch_device),))
        return Trial(tiny, device, estimated=True)
    if work.nbytes <= limit * _HARMLESS_SHARE:
        return Trial(call, device, memory_of(call, work, device))

    part = shrink(call, work, limit_bytes=int(limit * _HARMLESS_SHARE))
    if part is None:
        if 2 * work.nbytes > limit:
            raise TooLarge(f"needs {work.nbytes} bytes of the limit of {limit}, and no size can be reduced")
        return Trial(call, device, memory_of(call, work, device))
    while True:
        # Grow step by step: a small chunk may use another kernel, with another share of workspace.
        memory = memory_of(part.call, part.work, device)
        safe = limit / (1 + _WORKSPACE_MARGIN * memory.nbytes / part.work.nbytes)
        wanted = safe if work.nbytes <= safe else min(safe, _CHUNK_BYTES)
        allowed = min(wanted, part.work.nbytes * _GROWTH)
        if work.nbytes <= allowed:
            return Trial(call, device, memory_of(call, work, device))
        larger = shrink(call, work, limit_bytes=int(allowed))
        if larger is None or larger.work.nbytes < part.work.nbytes * _LEAST_GROWTH:
            break
        part = larger
    # near in size, so that both use the same kernel
    less = shrink(call, work, limit_bytes=int(part.work.nbytes * 0.75))
    near, near_memory = (part, memory) if less is None else (less, memory_of(less.call, less.work, device))
    return _scaled_trial(work, part, _extrapolated(work, near, near_memory, part, memory), device)


def _scaled_trial(work: Work, part: SmallerCall, memory: OpMemory, device: Device) -> Trial:
    return Trial(part.call, device, memory, factor=work.ratio_to(part.work), estimated=True)


def memory_of(call: Call, work: Work, device: Device) -> OpMemory:
    """Bytes of the call beyond those that its fake run shows; this run also warms up."""
    args, kwargs = make_sample(call)
    if device.keeps_after_first_run:
        call.target(*args, **kwargs)
        args, kwargs = make_sample(call)  # the op may have written to its inputs
    result, peak_bytes = device.measured(partial(call.target, *args, **kwargs))
    outputs = fresh_storages(result, (args, kwargs))
    hidden: tuple[int, ...] = ()
    if len(outputs) == len(work.outputs):
        # example: the mean of a loss is computed in a block of the size of its input and keeps that block
        hidden = tuple(max(0, real - fake) for real, fake in zip(outputs, work.outputs, strict=True))
    return OpMemory(max(0, peak_bytes - sum(outputs)), hidden if any(hidden) else ())


def _extrapolated(
    work: Work, small: SmallerCall, near: OpMemory, large: SmallerCall, far: OpMemory
) -> OpMemory:
    """Memory of `work` on the line through two chunks; in proportion where the chunks give no line."""

    def at_work(near_bytes: int, far_bytes: int) -> int:
        if small.reduced != large.reduced or small.work.nbytes == large.work.nbytes:
            return round(far_bytes * work.nbytes / large.work.nbytes)
        slope = (far_bytes - near_bytes) / (large.work.nbytes - small.work.nbytes)
        return max(0, round(far_bytes + slope * (work.nbytes - large.work.nbytes)))

    hidden = zip_longest(near.hidden_bytes, far.hidden_bytes, fillvalue=0)
    return OpMemory(
        at_work(near.workspace_bytes, far.workspace_bytes), tuple(at_work(*pair) for pair in hidden)
    )


def in_one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
