"""One method on one target in a fresh process: results against eager, peak, and time in turn with eager.

All in one process, so that a method is compiled once and its time is a ratio within one run. The
peak is torch's own count of bytes, which does not depend on what the process did before.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from lowtide.checking.clock import Timing, time_steps
from lowtide.checking.comparison import Start, record
from lowtide.checking.fresh import run_fresh
from lowtide.checking.measure import WARM_UP_STEPS
from lowtide.checking.peak import peak_above_start
from lowtide.checking.train_step import device_of, static_bytes, train_step
from lowtide.experiments.contenders import Method, Switch, reference_for, switch_for
from lowtide.experiments.mistakes import GRADIENT, Mistake, judge, mistakes, shaken, weighed
from lowtide.report.records import Results
from lowtide.torchside import hooks
from lowtide.zoo.targets import Target, TargetSpec

STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a method does in truth, next to eager in the same process.

    `mistakes` are against eager or, where the method compiles the model into other ops, against those
    ops run without recompute; then `unlike_eager`.
    """

    peak_bytes: int
    baseline_peak_bytes: int
    timing: Timing | None
    baseline_timing: Timing | None
    mistakes: tuple[Mistake, ...]
    unlike_eager: bool
    num_gradients: int

    @property
    def overhead(self) -> float | None:
        """Measured time that the method adds, as a fraction of eager's."""
        if self.timing is None or self.baseline_timing is None:
            return None
        return self.timing.added_to(self.baseline_timing)

    @property
    def noise(self) -> float | None:
        """How far off `overhead` may be."""
        if self.timing is None or self.baseline_timing is None:
            return None
        return self.timing.noise_beside(self.baseline_timing)

    @property
    def time_ratio(self) -> float | None:
        return None if self.overhead is None else 1 + self.overhead

    @property
    def judgement(self) -> tuple[Results, str]:
        """What the results are, and what is wrong with them: `72 of 73 gradients, 12 buffers`."""
        return judge(self.mistakes, num_gradients=self.num_gradients, unlike_eager=self.unlike_eager)


def try_method(source: TargetSpec, method: Method, *, timed_runs: int) -> Trial:
    """Try `method` on `source` in a fresh process; FreshProcessError where it fails there."""
    trial: Trial = run_fresh(
        "lowtide.experiments.trial:run_trial", source=source, method=method, timed_runs=timed_runs
    )
    return trial


def run_trial(*, source: TargetSpec | Target, method: Method, timed_runs: int, steps: int = STEPS) -> Trial:
    """The fresh process's job."""
    target = source.load() if isinstance(source, TargetSpec) else source
    try:
        return _run(target, method, timed_runs, steps)
    except hooks.BackendCompilerFailed as error:
        # its own text starts with lines that say nothing of what went wrong
        raise error.inner_exception from error


def _run(target: Target, method: Method, timed_runs: int, steps: int) -> Trial:
    switch = switch_for(method, target)
    with tempfile.TemporaryDirectory(prefix="lowtide-") as folder:
        start = Start(target)
        expected = record(target, start, Path(folder) / "eager", steps)
        num_gradients = sum(name.startswith(GRADIENT) for name in torch.load(expected[0], mmap=True))
        switch.on()
        found = mistakes(target, start, expected)
        switch.off()
        is_wrong = any(mistake.wrong for mistake in found)
        sensitivity = shaken(target, start, expected[0]) if is_wrong else {}
        reference = reference_for(method, target) if found else None
        if reference is not None:
            reference.on()
            expected = record(target, start, Path(folder) / "eager", steps)
            reference.off()
            switch.on()
            found = mistakes(target, start, expected)
            switch.off()
        start.restore()
    timing, baseline_timing = _times(target, switch, timed_runs)
    baseline_peak_bytes = _peak(target)
    switch.on()
    peak_bytes = _peak(target)
    return Trial(
        peak_bytes=peak_bytes,
        baseline_peak_bytes=baseline_peak_bytes,
        timing=timing,
        baseline_timing=baseline_timing,
        mistakes=tuple(weighed(found, sensitivity)),
        unlike_eager=reference is not None,
        num_gradients=num_gradients,
    )


def _times(target: Target, switch: Switch, runs: int) -> tuple[Timing | None, Timing | None]:
    if not runs:
        return None, None

    def method() -> None:
        switch.on()
        _step(target)
        switch.off()

    device = device_of(target.model, target.batch)
    timings = time_steps(
        {"eager": lambda: _step(target), "method": method}, device=device, warm_up=2, runs=runs
    )
    return timings["method"], timings["eager"]


def _peak(target: Target) -> int:
    for _ in range(WARM_UP_STEPS):
        _step(target)
    device = device_of(target.model, target.batch)
    above = peak_above_start(lambda: _step(target), device=device)
    return static_bytes(target.model, target.batch, target.optimizer) + above


def _step(target: Target) -> None:
    train_step(target.model, target.batch, target.optimizer, target.loss)
