"""The measurements of `bench/levers.py`: eager once, and every plan beside it."""

import copy
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import lowtide
from lowtide.facts.serial import solution_to_dict
from lowtide.offload import disk_store
from lowtide.verification.comparison import planned
from lowtide.verification.fresh_process import run_fresh
from lowtide.verification.measure_step import (
    device_of,
    peak_above_start,
    static_bytes,
    time_steps,
    train_step,
)
from lowtide.verification.trained_steps import Start, differences, record
from lowtide.zoo.targets import Target, TargetSpec

STEPS = 2
"""That are compared with eager: the second sees what the first has left behind."""


@dataclass(frozen=True)
class Found:
    """Of one plan; `waited_seconds` is None where nothing is offloaded."""

    peak_bytes: int
    eager_peak_bytes: int
    overhead: float | None
    waited_seconds: float | None
    differences: Sequence[str]


class Measure:
    """A target in this process, trained eagerly once for all plans; peaks are those of fresh processes."""

    def __init__(self, spec: TargetSpec, folder: Path) -> None:
        self.spec, self.plain = spec, spec.load()
        self._start = Start(self.plain)
        self._expected = record(self.plain, self._start, folder / "eager", STEPS)
        self._eager_peaks: dict[bool, int] = {}

    def of(self, plan: lowtide.Plan, *, absent: Sequence[str], timed_runs: int) -> Found:
        """Peak, time and results of a plan that was made without the levers `absent`."""
        solution, holds = solution_to_dict(plan.solution), plan.solution.holds_outputs
        target = planned(self.spec.load(), solution=solution)
        start = copy.copy(self._start)  # the same values and random state
        start.target = target
        found = [str(difference) for difference in differences(target, start, self._expected)]
        with _waits() as waits:
            timings = time_steps(
                {"eager": _step(self.plain, holds), "planned": _step(target, holds)},
                device=device_of(target.model, target.batch),
                warm_up=0,
                runs=timed_runs,
            )
        lowtide.remove(target.model)
        del target
        if holds not in self._eager_peaks:
            self._eager_peaks[holds] = self._peak(None, holds, ())
        return Found(
            self._peak(solution, holds, absent),
            self._eager_peaks[holds],
            timings["planned"].added_to(timings["eager"]) if timed_runs else None,
            _per_step(waits, timed_runs) if waits else None,
            found,
        )

    def _peak(self, solution: dict[str, Any] | None, holds_outputs: bool, absent: Sequence[str]) -> int:
        sys.path[:] = dict.fromkeys((str(Path(__file__).parent / "levers_off"), *sys.path))
        with mock.patch.dict(os.environ, {"LEVERS_OFF": ",".join(absent)}):
            found: int = run_fresh(
                "levers_measure:peak_of", spec=self.spec, solution=solution, holds_outputs=holds_outputs
            )
        return found


def peak_of(*, spec: TargetSpec, solution: dict[str, Any] | None, holds_outputs: bool) -> int:
    """The job of the fresh process: the peak of the second step, by torch's count."""
    target = spec.load()
    if solution is not None:
        target = planned(target, solution=solution)
    step = _step(target, holds_outputs)
    step()  # makes the optimizer's state
    return peak_above_start(step) + static_bytes(target.model, target.batch, target.optimizer)


def _step(target: Target, holds_outputs: bool) -> Callable[[], object]:
    def run() -> object:
        return train_step(
            target.model, target.batch, target.optimizer, target.loss, holds_outputs=holds_outputs
        )

    return run


@contextmanager
def _waits() -> Iterator[list[float]]:
    """How long each transfer was waited for."""
    waits: list[float] = []
    wait = disk_store.FileTransfer.wait

    def timed(copy: disk_store.FileTransfer) -> None:
        begin = time.perf_counter()
        wait(copy)
        waits.append(time.perf_counter() - begin)

    with mock.patch.object(disk_store.FileTransfer, "wait", timed):
        yield waits


def _per_step(waits: list[float], steps: int) -> float:
    """Every step waits for as many transfers."""
    count = len(waits) // steps
    return median(sum(waits[i * count : (i + 1) * count]) for i in range(steps))
