"""One op under measurement: its runs, spread over rounds, and whether they agree."""

import statistics
from dataclasses import dataclass, field
from functools import partial

from lowtide.ops.calls import Call, OpCost
from lowtide.ops.schema import is_view
from lowtide.profiling.devices import (
    SLOW_SECONDS,
    Device,
    OpTiming,
    rest_after,
    spread_seconds,
    typical_seconds,
)
from lowtide.profiling.samples import make_sample

ROUNDS = 8
_SHORT_SECONDS = 2e-3
_SLOW_ROUNDS = 5

_JITTER_SECONDS = 20e-6
"""What any clock is off by now and then; an op as short as that weighs nothing in a plan."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What a call holds beyond its inputs and fake outputs: inside, and in each fresh output's storage."""

    workspace_bytes: int = 0
    hidden_bytes: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.workspace_bytes + sum(self.hidden_bytes)


@dataclass
class Trial:
    """A call under measurement: itself, or a slice that `factor` scales up."""

    call: Call
    device: Device
    memory: Memory = Memory()
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
        """Whether its time tells more of the machine's unrest than of the op: it never ran undisturbed, or
        its runs are further apart than it takes, page faults included, which are never all alike."""
        whole = statistics.median(timing.whole_seconds for timing in self.timings)
        return not self.settled or spread_seconds(self.timings) > max(whole, _JITTER_SECONDS)

    def time(self, *, attempts: int) -> None:
        """Add an undisturbed run, or as many disturbed ones as may be tried."""
        for attempt in range(attempts):
            if attempt:
                rest_after(self.timings[-1])
            self.timings.append(timed(self.call, self.device))
            if not self.timings[-1].avoidable:
                return

    def takes_part(self, number: int) -> bool:
        """Whether it runs in this round: short ops in all, slow ones in the first few."""
        last = self.timings[-1].whole_seconds if self.timings else 0.0
        return number <= (_SLOW_ROUNDS if last > SLOW_SECONDS else ROUNDS) and (
            last < _SHORT_SECONDS or number % 2 == 1
        )


def timed(call: Call, device: Device) -> OpTiming:
    """One run on fresh inputs; a function of its own, so that nothing of it outlives it."""
    args, kwargs = make_sample(call, fill=not is_view(call))
    return device.timed_in_own_memory(partial(call.target, *args, **kwargs))[1]
