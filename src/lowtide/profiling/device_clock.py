"""The time of work on a device that runs behind the host, without the time to launch it.

The host launches an op in some microseconds, and an idle device waits for that: two events around a small op
measure the launch. In a step the host is ahead, and the device goes from op to op. So other work is queued
first, long enough for the host to launch the op meanwhile:

    host      fill fill fill .. start op stop
    device         [ fill ][ fill ][ fill ] .. start [op] stop

The op runs once, as it would in a step: repeats between two events would write an in-place op's result over
its own input, and would still cost one launch each where the host is slower than the device. An op that waits
for the device, such as `nonzero`, drains the queue; its launches are part of its time, as in a step.

How much to queue is measured once per device: fills are enqueued, and an event behind them tells whether the
device is still at work when the host is done. A device that is done by then runs each op at once, as a CPU
does; nothing is queued there.

Shortcoming: an op of many kernels that takes the host more than `QUEUED_SECONDS` has launches in its time.
"""

import logging
import math
import time
from collections.abc import Callable
from typing import TypeVar

import torch

R = TypeVar("R")

QUEUED_SECONDS = 0.5e-3
"""The work that is left when the host begins to launch an op, which takes it some ten microseconds."""
FILL_BYTES = 16 << 20
"""A fill takes the device longer than the host: tens of microseconds."""
SCRATCH_BYTES = 2 * FILL_BYTES
_TRIAL_FILLS = 8
_MOST_FILLS = 500

_log = logging.getLogger(__name__)


class DeviceClock:
    """Times work on the current stream of the current device; every device has its own."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._num_fills: int | None = None

    def time(self, run: Callable[[], R]) -> tuple[R, float]:
        """The result of `run` and the seconds that the device works for it."""
        start, stop = self.event(), self.event()
        self.synchronize()
        self._queue_work()
        start.record()
        result = run()
        stop.record()
        stop.synchronize()
        return result, start.elapsed_time(stop) / 1e3

    def event(self) -> torch.Event:
        return torch.Event(self._device_type, enable_timing=True)

    def synchronize(self) -> None:
        torch.accelerator.synchronize()

    def filler(self) -> Callable[[], object]:
        """A function that enqueues a fill. The memory is freed with it: the step must not find it."""
        source = torch.zeros(FILL_BYTES // 4, device=self._device_type)
        target = torch.empty_like(source)
        return lambda: torch.exp(source, out=target)

    def _queue_work(self) -> None:
        if self._num_fills == 0:
            return
        try:
            fill = self.filler()
        except torch.OutOfMemoryError:
            _log.debug("the device is too full to queue work before an op: its time has that of its launch")
            return
        if self._num_fills is None:
            self._num_fills = self._measured_fills(fill)
        for _ in range(self._num_fills):
            fill()

    def _measured_fills(self, fill: Callable[[], object]) -> int:
        """How many fills keep the device at work `QUEUED_SECONDS` longer than the host; 0 where none do."""
        fill()
        begin, end = self.event(), self.event()
        self.synchronize()
        before = time.perf_counter()
        begin.record()
        for _ in range(_TRIAL_FILLS):
            fill()
        end.record()
        host_seconds = time.perf_counter() - before
        behind = not end.query()
        end.synchronize()
        lead_seconds = (begin.elapsed_time(end) / 1e3 - host_seconds) / _TRIAL_FILLS
        if not behind or lead_seconds <= 0:
            return 0
        return min(_MOST_FILLS, math.ceil(QUEUED_SECONDS / lead_seconds))
