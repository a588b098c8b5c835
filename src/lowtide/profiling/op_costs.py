"""Time and inner memory of single ops, each distinct signature measured once, on random data.

What makes the times hold for the whole step, found by comparing with real runs (`bench/profile_modes.py`):
the inputs are written right before each timed run, so that they lie where a producer would have left
them in the caches; a signature's runs are spread over several rounds with all the others in between,
so that neither its code nor its memory is unrealistically warm, and a busy moment of the machine
does not hit all runs of one op.
"""

import logging
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

import torch

from lowtide.ops.calls import Call, OpCost, signature
from lowtide.ops.schema import is_view, talks_to_others
from lowtide.profiling.cache import CostCache
from lowtide.profiling.devices import Device, device_for
from lowtide.profiling.samples import SAMPLE_EXTRA_BYTES, make_sample
from lowtide.profiling.shrink import Slice, shrink
from lowtide.profiling.time_limit import hurry_now
from lowtide.profiling.trials import ROUNDS, Memory, Trial
from lowtide.profiling.work import Work, fresh_storages, visible_work_of, work_of

_log = logging.getLogger(__name__)

_PATIENCE_SECONDS = 8.0
_PATIENCE_IN_A_HURRY_SECONDS = 2.0
_MORE_PATIENCE = 2
_RUNS_TO_REMEMBER = 3
"""Times of fewer runs, as in a hurry, are good for a rough answer, and not for all that comes later."""
_ATTEMPTS = 2

# An op of this share of the limit is run whole without asking a slice first what it holds inside.
_HARMLESS_SHARE = 1 / 16
# How much more than its slice said an op may hold inside.
_WORKSPACE_MARGIN = 1.25
# From one slice to the next: at most, and at least to be worth a try.
_GROWTH = 4
_LEAST_GROWTH = 1.25
# Shares of an op that fails which are tried instead.
_LESS = (0.6, 0.3, 0.15)
# The largest slice of an op that never fits: a larger one takes longer and tells no more.
_SLICE_BYTES = 256 << 20

Progress = Callable[[int, int], None]


def _patience_seconds() -> float:
    return _PATIENCE_SECONDS if hurry_now() is None else _PATIENCE_IN_A_HURRY_SECONDS


class _TooLarge(Exception):
    """An op that neither fits nor can be reduced."""


@dataclass(frozen=True, slots=True)
class CallCosts:
    """Costs in the order of the calls; of the `num_measured` distinct ones that were measured now, the
    times of `num_noisy` are not to be relied on."""

    costs: list[OpCost]
    num_measured: int
    num_noisy: int

    @property
    def note(self) -> str:
        """What to tell of a machine that was too busy to time; empty where it was not."""
        if not self.num_noisy:
            return ""
        return (
            f"the machine was too busy to time {self.num_noisy} of {self.num_measured} ops: their times may "
            "be far off and are not remembered. Profile again when it is idle"
        )


def profile_calls(
    calls: Sequence[Call],
    *,
    memory_limit_bytes: int = 1 << 30,
    cache: CostCache | None = None,
    progress: Progress | None = None,
) -> list[OpCost]:
    """The costs alone of `measure_calls`."""
    return measure_calls(calls, memory_limit_bytes=memory_limit_bytes, cache=cache, progress=progress).costs


def measure_calls(
    calls: Sequence[Call],
    *,
    memory_limit_bytes: int = 1 << 30,
    cache: CostCache | None = None,
    progress: Progress | None = None,
) -> CallCosts:
    """Costs in the order of `calls`; calls of equal signature are measured once.

    Never holds more than `memory_limit_bytes` at a time: a larger op is timed on a slice and scaled.
    What cannot be run at all, or would wait for other processes, is costed by its bytes. All these are
    marked `estimated`; what cannot be run is logged with its reason. Times that the machine was too busy
    for are logged and kept out of the cache. The global random state is left as it was.
    """
    signatures = [signature(call) for call in calls]
    distinct = dict(zip(reversed(signatures), reversed(calls), strict=True))
    costs: dict[str, OpCost] = {}
    missing: dict[str, Call] = {}
    hurry = hurry_now()
    in_hurry = None if hurry is None else hurry.measured
    for key in dict.fromkeys(signatures):
        known = cache.get(key, memory_limit_bytes=memory_limit_bytes) if cache is not None else None
        if distinct[key].target is operator.getitem:
            costs[key] = OpCost(0.0, 0, estimated=False)
        elif talks_to_others(distinct[key].target):
            costs[key] = cost_by_bytes(distinct[key])
        elif known is not None:
            costs[key] = known
        elif in_hurry is not None and key in in_hurry:
            costs[key] = in_hurry[key]
        else:
            missing[key] = distinct[key]

    trials, failed = _measure(missing, memory_limit_bytes=memory_limit_bytes, progress=progress)
    costs |= {key: trial.cost for key, trial in trials.items()}
    if in_hurry is not None:
        in_hurry |= {key: costs[key] for key in trials}
    settled = [key for key, trial in trials.items() if not trial.noisy]
    if cache is not None and settled:
        for key in settled:
            if in_hurry is not None and len(trials[key].timings) < _RUNS_TO_REMEMBER:
                continue
            cache.put(key, costs[key], memory_limit_bytes=memory_limit_bytes)
        cache.save()
    costs |= {key: _cost_by_like(key, missing, costs) for key in failed}
    found = CallCosts([costs[key] for key in signatures], len(trials), len(trials) - len(settled))
    if found.note:
        _log.warning(found.note)
    return found


def cost_by_bytes(call: Call) -> OpCost:
    """The time to read the inputs and to write the outputs at the device's copy speed; estimated."""
    # A copied byte is read and written.
    return OpCost(
        visible_work_of(call).nbytes / 2 / _device_of(call).copy_bytes_per_second(), 0, estimated=True
    )


def _cost_by_like(key: str, calls: Mapping[str, Call], costs: Mapping[str, OpCost]) -> OpCost:
    """By bytes, and as much inside for each as the call of the same op holds that holds most."""
    call = calls[key]
    cost, nbytes = cost_by_bytes(call), visible_work_of(call).nbytes
    shares = [
        costs[other].workspace_bytes / max(1, visible_work_of(calls[other]).nbytes)
        for other in calls
        if other in costs and calls[other].target is call.target
    ]
    return replace(cost, workspace_bytes=round(max(shares, default=0.0) * nbytes))


def _measure(
    calls: Mapping[str, Call], *, memory_limit_bytes: int, progress: Progress | None
) -> tuple[dict[str, Trial], list[str]]:
    """Finished trials by signature, and the signatures that could not be run."""
    trials: dict[str, Trial] = {}
    failed: list[str] = []
    total = len(calls) * (1 + ROUNDS)
    with _as_a_step_runs(calls.values()):
        for done, (key, call) in enumerate(calls.items(), 1):
            try:
                trials[key] = _prepare_or_less(key, call, memory_limit_bytes=memory_limit_bytes)
            except Exception as error:
                _log.warning(
                    "costed by its bytes, and by its like for what it holds inside, since it cannot be run "
                    "alone: %s: %s",
                    key,
                    error,
                )
                failed.append(key)
            if progress is not None:
                progress(done, total)
        start = time.perf_counter()
        for number in range(1, ROUNDS + 1):
            for done, trial in enumerate(trials.values(), 1):
                # Those that never ran undisturbed get more time to do so.
                patience = _patience_seconds() * (1 if trial.settled else _MORE_PATIENCE)
                if number == 1:
                    trial.time(attempts=1)
                elif trial.takes_part(number) and time.perf_counter() < start + patience:
                    trial.time(attempts=_ATTEMPTS)
                if progress is not None:
                    progress(len(calls) * number + done, total)
    if progress is not None:
        progress(total, total)
    return trials, failed


@contextmanager
def _as_a_step_runs(calls: Iterable[Call]) -> Iterator[None]:
    """Without gradients and autocast of its own; the random state is left as it was."""
    with ExitStack() as guards:
        guards.enter_context(torch.no_grad())
        for device in dict.fromkeys(_device_of(call) for call in calls):
            guards.enter_context(device.kept_rng())
            guards.enter_context(torch.autocast(device.torch_device.type, enabled=False))
        yield


def memory_of_calls(
    calls: Mapping[str, tuple[Call, int]], *, memory_limit_bytes: int = 1 << 30
) -> dict[str, Memory]:
    """What calls hold inside, by the same names: one run each, on a slice where it does not fit. Those that
    cannot be run are left out. Each comes with the bytes that it should hold inside."""
    found: dict[str, Memory] = {}
    with _as_a_step_runs(call for call, _ in calls.values()):
        for name, (call, expected_bytes) in calls.items():
            try:
                work = work_of(call)
                if work.nbytes + 2 * expected_bytes <= memory_limit_bytes - SAMPLE_EXTRA_BYTES:
                    # known well enough to go without a slice that says whether the whole fits
                    found[name] = _memory(call, work, _device_of(call))
                else:
                    found[name] = _prepare_or_less(name, call, memory_limit_bytes=memory_limit_bytes).memory
            except Exception as error:
                _log.debug("what it holds inside is not measured: %s: %s", name, error)
    return found


def _prepare_or_less(key: str, call: Call, *, memory_limit_bytes: int) -> Trial:
    """As `_prepare`; of an op that fails, itself if only its slices do, else the largest slice that does not,
    scaled up."""
    try:
        return _prepare(call, memory_limit_bytes=memory_limit_bytes)
    except _TooLarge:
        raise
    except Exception as error:
        work, device = work_of(call), _device_of(call)
        if 2 * work.nbytes <= memory_limit_bytes - SAMPLE_EXTRA_BYTES:
            with suppress(Exception):
                return Trial(call, device, _memory(call, work, device))
        for share in _LESS:
            part = shrink(call, work, limit_bytes=int(work.nbytes * share))
            if part is None or not part.reduced:
                break
            try:
                memory = _memory(part.call, part.work, device)
            except Exception:
                continue
            _log.warning("costed by a slice, since it fails alone: %s: %s", key, error)
            memory = _extrapolated(work, part, memory, part, memory)
            return Trial(part.call, device, memory, factor=work.ratio_to(part.work), estimated=True)
        raise


def _prepare(call: Call, *, memory_limit_bytes: int) -> Trial:
    """Warm up and measure the memory inside, on the whole call or on a slice that fits."""
    device, limit = _device_of(call), memory_limit_bytes - SAMPLE_EXTRA_BYTES
    work = work_of(call)
    if is_view(call) and work.nbytes <= limit:
        return Trial(call, device)
    if is_view(call):
        # A view costs its dispatch, whatever its size.
        tiny = Call(torch.ops.aten.detach.default, (torch.empty(1, device=device.torch_device),))
        return Trial(tiny, device, estimated=True)
    if work.nbytes <= limit * _HARMLESS_SHARE:
        return Trial(call, device, _memory(call, work, device))

    part = shrink(call, work, limit_bytes=int(limit * _HARMLESS_SHARE))
    if part is None:
        if 2 * work.nbytes > limit:
            raise _TooLarge(f"needs {work.nbytes} bytes of the limit of {limit}, and no size can be reduced")
        return Trial(call, device, _memory(call, work, device))
    while True:
        # Grow step by step: a small slice may run in another way inside, and hold another share.
        memory = _memory(part.call, part.work, device)
        safe = limit / (1 + _WORKSPACE_MARGIN * memory.nbytes / part.work.nbytes)
        wanted = safe if work.nbytes <= safe else min(safe, _SLICE_BYTES)
        allowed = min(wanted, part.work.nbytes * _GROWTH)
        if work.nbytes <= allowed:
            return Trial(call, device, _memory(call, work, device))
        larger = shrink(call, work, limit_bytes=int(allowed))
        if larger is None or larger.work.nbytes < part.work.nbytes * _LEAST_GROWTH:
            break
        part = larger
    # Near each other, so that both run the same way inside.
    less = shrink(call, work, limit_bytes=int(part.work.nbytes * 0.75))
    if less is not None:
        memory = _extrapolated(work, less, _memory(less.call, less.work, device), part, memory)
    else:
        memory = _extrapolated(work, part, memory, part, memory)
    return Trial(part.call, device, memory, factor=work.ratio_to(part.work), estimated=True)


def _memory(call: Call, work: Work, device: Device) -> Memory:
    """Bytes that the call holds beyond what its fake run shows; this run also warms up."""
    args, kwargs = make_sample(call)
    if device.keeps_after_first_run:
        call.target(*args, **kwargs)
        args, kwargs = make_sample(call)  # an op may have written to the first ones
    result, peak_bytes = device.measured(partial(call.target, *args, **kwargs))
    outputs = fresh_storages(result, (args, kwargs))
    hidden: tuple[int, ...] = ()
    if len(outputs) == len(work.outputs):
        # A loss's mean, for one, is computed in a block of the size of its input and keeps that block.
        hidden = tuple(max(0, real - fake) for real, fake in zip(outputs, work.outputs, strict=True))
    return Memory(max(0, peak_bytes - sum(outputs)), hidden if any(hidden) else ())


def _extrapolated(work: Work, small: Slice, near: Memory, large: Slice, far: Memory) -> Memory:
    """Memory of `work` on the line through two slices and theirs; in proportion where they are no line."""

    def at_work(near_bytes: int, far_bytes: int) -> int:
        if small.reduced != large.reduced or small.work.nbytes == large.work.nbytes:
            return round(far_bytes * work.nbytes / large.work.nbytes)
        slope = (far_bytes - near_bytes) / (large.work.nbytes - small.work.nbytes)
        return max(0, round(far_bytes + slope * (work.nbytes - large.work.nbytes)))

    hidden = zip_longest(near.hidden_bytes, far.hidden_bytes, fillvalue=0)
    return Memory(
        at_work(near.workspace_bytes, far.workspace_bytes), tuple(at_work(*pair) for pair in hidden)
    )


def _device_of(call: Call) -> Device:
    named = call.kwargs.get("device")
    for tensor in call.tensors:
        return device_for(tensor.device)
    return device_for(torch.device(named) if named is not None else torch.device("cpu"))
