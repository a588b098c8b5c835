"""Time and workspace of single ops, each distinct signature measured once, on random data.

Two rules make the times valid for the whole step (`bench/profile_modes.py` compares them with real runs). The
inputs are written right before each timed run, so that they are in the caches as after a producer. The runs
of one signature are spread over several rounds with all others in between: its code and its memory are then
as cold as in a step, and a short load on the machine does not disturb all runs of one op.

`short_time_limit`: profiles of one step at several sizes share their costs, and take less time each.
"""

import logging
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from lowtide.ops.calls import Call, OpCost, signature
from lowtide.ops.collectives import inside_bytes
from lowtide.ops.schema import talks_to_others
from lowtide.profiling.cache import CostCache
from lowtide.profiling.devices import outside_profiler
from lowtide.profiling.op_trials import (
    ROUNDS,
    OpMemory,
    Trial,
    device_of,
    in_one_line,
    memory_of,
    start_trial,
)
from lowtide.profiling.samples import SAMPLE_EXTRA_BYTES
from lowtide.profiling.work import visible_work_of, work_of
from lowtide.units import format_size

if TYPE_CHECKING:
    from lowtide.profiling.costing import KnownCosts

_log = logging.getLogger(__name__)

_TIME_LIMIT_SECONDS = 8.0
_SHORT_TIME_LIMIT_SECONDS = 2.0
_MORE_TIME = 2
"""The factor on the time limit of an op whose runs were all interrupted."""
_RUNS_TO_REMEMBER = 3
"""Times of fewer runs, under the short time limit, do not go into the cache."""
_ATTEMPTS = 2

_REFUSALS = (RuntimeError, ValueError, IndexError, NotImplementedError)
"""The errors of ops that do not accept random values."""

COSTED_BY_BYTES = (
    "costed by its bytes, with the workspace of the same op at other sizes, since the op cannot be run "
    "alone: %s: %s"
)

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortTimeLimit:
    """Ops run fewer times; an op whose cost is in `measured` does not run. New costs go into `measured`.

    An op that `known` has at another size is not timed. It runs once, to measure its workspace, where that
    should have at least `least_bytes`.
    """

    measured: dict[str, OpCost]
    known: "KnownCosts | None" = None
    least_bytes: int = 0


_short_limit: ContextVar[ShortTimeLimit | None] = ContextVar("short_time_limit", default=None)
short_limit_now = _short_limit.get


@contextmanager
def short_time_limit(limit: ShortTimeLimit) -> Iterator[None]:
    """Measure under this limit inside the block."""
    token = _short_limit.set(limit)
    try:
        yield
    finally:
        _short_limit.reset(token)


@dataclass(frozen=True, slots=True)
class CallCosts:
    """Costs in the order of the calls; of the `num_measured` calls measured now, `num_noisy` have unreliable
    times, and `num_estimated` did not run whole since the device had only `free_bytes` free."""

    costs: list[OpCost]
    num_measured: int
    num_noisy: int
    num_estimated: int = 0
    free_bytes: int = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about a machine that was too busy, or a device that was too full; none for an idle one."""
        notes = []
        if self.num_noisy:
            notes.append(
                f"the machine was too busy to time {self.num_noisy} of {self.num_measured} ops: their times "
                "may be far off and are not remembered. Profile again when it is idle"
            )
        if self.num_estimated:
            notes.append(
                f"the device had {format_size(self.free_bytes)} free to measure with, too little for "
                f"{self.num_estimated} ops: their costs are estimated. Free what other tensors and programs "
                "have there, and profile again"
            )
        return tuple(notes)


def measure_calls(
    calls: Sequence[Call],
    *,
    memory_limit_bytes: int = 1 << 30,
    cache: CostCache | None = None,
    progress: Progress | None = None,
) -> CallCosts:
    """Costs in the order of `calls`; calls of equal signature are measured once.

    At most `memory_limit_bytes` are live at a time: a larger op is timed on a chunk and scaled. An op that
    cannot run, or would wait for other processes, is costed by its bytes. All these are marked `estimated`;
    an op that cannot run is logged with its reason. Unreliable times are logged and not cached. The global
    random state does not change.
    """
    asked_bytes, memory_limit_bytes = memory_limit_bytes, _within_free(calls, memory_limit_bytes)
    signatures = [signature(call) for call in calls]
    distinct = dict(zip(reversed(signatures), reversed(calls), strict=True))
    costs: dict[str, OpCost] = {}
    missing: dict[str, Call] = {}
    limit = short_limit_now()
    shared = {} if limit is None else limit.measured
    for key in dict.fromkeys(signatures):
        known = cache.get(key, memory_limit_bytes=memory_limit_bytes) if cache is not None else None
        if distinct[key].target is operator.getitem:
            costs[key] = OpCost(0.0, 0, estimated=False)
        elif talks_to_others(distinct[key].target):
            costs[key] = cost_of_exchange(distinct[key])
        elif known is not None:
            costs[key] = known
        elif key in shared:
            costs[key] = shared[key]
        else:
            missing[key] = distinct[key]

    measure = partial(_measure, missing, memory_limit_bytes=memory_limit_bytes, progress=progress)
    trials, failed = outside_profiler(measure)
    costs |= {key: trial.cost for key, trial in trials.items()}
    shared |= {key: costs[key] for key in trials}
    settled = [key for key, trial in trials.items() if not trial.noisy]
    if cache is not None and settled:
        for key in settled:
            if limit is None or len(trials[key].timings) >= _RUNS_TO_REMEMBER:
                cache.put(key, costs[key], memory_limit_bytes=memory_limit_bytes)
        cache.save()
    costs |= {key: _cost_by_like(key, missing, costs) for key in failed}
    found = CallCosts(
        [costs[key] for key in signatures],
        len(trials),
        len(trials) - len(settled),
        sum(costs[key].estimated for key in missing) if memory_limit_bytes < asked_bytes else 0,
        memory_limit_bytes,
    )
    for note in found.notes:
        _log.warning(note)
    return found


def _within_free(calls: Iterable[Call], limit_bytes: int) -> int:
    """A memory limit as far as the devices of these calls have memory free."""
    return min(
        (one.within_free(limit_bytes) for one in {device_of(call) for call in calls}), default=limit_bytes
    )


def cost_by_bytes(call: Call) -> OpCost:
    """The time to read the inputs and to write the outputs at the device's copy speed; estimated."""
    # A copied byte is read and written.
    seconds = visible_work_of(call).nbytes / 2 / device_of(call).copy_bytes_per_second()
    return OpCost(seconds, 0, estimated=True)


def cost_of_exchange(call: Call) -> OpCost:
    """Of an op that waits for other processes."""
    return replace(cost_by_bytes(call), workspace_bytes=inside_bytes(call))


def _cost_by_like(key: str, calls: Mapping[str, Call], costs: Mapping[str, OpCost]) -> OpCost:
    """By bytes, with the largest share of workspace among measured calls of the same op."""
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
    """Finished trials by signature, and the signatures that cannot run."""
    trials: dict[str, Trial] = {}
    failed: list[str] = []
    total = len(calls) * (1 + ROUNDS)
    limit_seconds = _TIME_LIMIT_SECONDS if short_limit_now() is None else _SHORT_TIME_LIMIT_SECONDS
    with as_a_step_runs(calls.values()):
        for done, (key, call) in enumerate(calls.items(), 1):
            try:
                trials[key] = start_trial(key, call, memory_limit_bytes=memory_limit_bytes)
            except Exception as error:
                _log.warning(COSTED_BY_BYTES, key, in_one_line(error))
                failed.append(key)
            if progress is not None:
                progress(done, total)
        start = time.perf_counter()
        for number in range(1, ROUNDS + 1):
            for done, (key, trial) in enumerate(list(trials.items()), 1):
                seconds = limit_seconds * (1 if trial.settled else _MORE_TIME)
                try:
                    if number == 1:
                        trial.time(attempts=1)
                    elif trial.takes_part(number) and time.perf_counter() < start + seconds:
                        trial.time(attempts=_ATTEMPTS)
                except torch.OutOfMemoryError as error:
                    # it ran before: other programs may have taken memory since
                    if not trial.timings:
                        _log.warning(COSTED_BY_BYTES, key, in_one_line(error))
                        failed.append(key)
                        del trials[key]
                if progress is not None:
                    progress(len(calls) * number + done, total)
    if progress is not None:
        progress(total, total)
    return trials, failed


@contextmanager
def as_a_step_runs(calls: Iterable[Call]) -> Iterator[None]:
    """Without gradients and autocast; restores the global random state, from which some ops draw."""
    with ExitStack() as guards:
        guards.enter_context(torch.no_grad())
        for device in dict.fromkeys(device_of(call) for call in calls):
            guards.enter_context(device.kept_rng())
            guards.enter_context(torch.autocast(device.torch_device.type, enabled=False))
        yield


def measure_workspaces(
    calls: Mapping[str, tuple[Call, int]], *, memory_limit_bytes: int
) -> dict[str, OpMemory]:
    """Workspaces of calls, by the same names: one run each, on a chunk where a call does not fit.

    Each call has its expected workspace. Calls that cannot run, or would wait for other processes, are left
    out.
    """
    calls = {name: known for name, known in calls.items() if not talks_to_others(known[0].target)}
    limit_bytes = _within_free((call for call, _ in calls.values()), memory_limit_bytes)
    return outside_profiler(partial(_measure_workspaces, calls, memory_limit_bytes=limit_bytes))


def _measure_workspaces(
    calls: Mapping[str, tuple[Call, int]], *, memory_limit_bytes: int
) -> dict[str, OpMemory]:
    found: dict[str, OpMemory] = {}
    with as_a_step_runs(call for call, _ in calls.values()):
        for name, (call, expected_bytes) in calls.items():
            try:
                work = work_of(call)
                if work.nbytes + 2 * expected_bytes <= memory_limit_bytes - SAMPLE_EXTRA_BYTES:
                    # the expected workspace fits: no chunk needed first
                    found[name] = memory_of(call, work, device_of(call))
                else:
                    found[name] = start_trial(name, call, memory_limit_bytes=memory_limit_bytes).memory
            except Exception as error:
                refused = isinstance(error, _REFUSALS) and not isinstance(error, torch.OutOfMemoryError)
                level = logging.DEBUG if refused else logging.WARNING
                _log.log(level, "its workspace is not measured: %s: %s", name, in_one_line(error))
    return found
