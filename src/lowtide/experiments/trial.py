"""One method on one target in a fresh process: results against eager, peak, and time in turn with eager.

All in one process, so that a method is compiled once and its time is a ratio within one run. The peak is
torch's own count of bytes, which does not depend on earlier work of the process.

Results are exact, rounded or wrong. Bits are compared over all steps. Rounding or a mistake is decided after
the first step alone, since every optimizer magnifies rounding in the next ones. Some models magnify it in the
first step already, such as deep ones with batch norm on few samples. So eager trains once more, from
parameters that differ in the last bit: a difference as large as that is no mistake. Parameters themselves are
not judged, only their gradients: Adam's first step takes the sign of a gradient, which rounding may flip.

Where a method differs, eager trains from its own start again. Where eager differs from itself, a method is
judged by the first step alone, and by what eager's own repetitions do not change.
"""

import copy
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lowtide.experiments.contenders import Contender, Switch, reference_for, switch_for
from lowtide.report.results import Results
from lowtide.torch_compat import dynamo
from lowtide.trace.step_device import device_of
from lowtide.verification.fresh_process import run_fresh
from lowtide.verification.measure_step import (
    STEPS_IN_LOOP,
    WARM_UP_STEPS,
    Timing,
    peak_above_start,
    static_bytes,
    time_steps,
    train_steps,
)
from lowtide.verification.trained_steps import (
    BUFFER,
    GRADIENT,
    PARAMETER,
    Start,
    differences,
    record,
    results_in,
)
from lowtide.zoo.targets import Target, TargetSpec

STEPS = 2
ROUNDING = 1e-3
"""The largest error that counts as rounding, relative to the tensor's largest value."""

EAGER_DIFFERS = "as far as eager equals itself"

REPEATS = 4
"""How often eager trains again before a difference is the method's."""

SHAKEN = 10
"""The factor on the effect of a last-bit change of the parameters that still counts as rounding."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """A difference from eager training. `shaken`: the error of the same tensor in eager training from
    parameters that differ in the last bit."""

    name: str
    step: int
    error: float
    shaken: float = 0.0

    @property
    def wrong(self) -> bool:
        if self.step > 1 or self.name.startswith(PARAMETER):
            return False
        return not self.error <= max(ROUNDING, SHAKEN * self.shaken)


def mistakes(target: Target, start: Start, expected: Sequence[Path]) -> list[Mistake]:
    """Train from `start` and compare with the results on disk; the first difference comes first."""
    return [Mistake(found.name, found.step, found.error) for found in differences(target, start, expected)]


def shaken(target: Target, start: Start, expected: Path) -> dict[str, float]:
    """The relative errors of eager training's first step, by name, from parameters that differ from `start`
    in the last bit; `expected` is that step from `start` itself."""
    moved = copy.copy(start)
    moved.tensors = [_next_to(tensor) for tensor in start.tensors]
    return {found.name: found.error for found in differences(target, moved, [expected])}


def weighed(found: Sequence[Mistake], sensitivity: Mapping[str, float]) -> list[Mistake]:
    """The same differences, each with its error from `shaken`."""
    return [replace(mistake, shaken=sensitivity.get(mistake.name, 0.0)) for mistake in found]


def _next_to(values: torch.Tensor) -> torch.Tensor:
    return values * (1 + torch.finfo(values.dtype).eps) if values.is_floating_point() else values


def own_differences(target: Target, start: Start, expected: Sequence[Path]) -> dict[str, float]:
    """The relative errors of eager's first step from itself, by name; empty where eager equals itself."""
    errors: dict[str, float] = {}
    for _ in range(REPEATS):
        for found in differences(target, start, expected[:1]):
            errors[found.name] = max(errors.get(found.name, 0.0), found.error)
    return errors


def beyond(found: Sequence[Mistake], own: Mapping[str, float]) -> list[Mistake]:
    """The differences that eager's `own` do not explain."""
    first = [mistake for mistake in found if mistake.step == 1 and not mistake.name.startswith(PARAMETER)]
    return [mistake for mistake in first if not mistake.error <= SHAKEN * own.get(mistake.name, 0.0)]


def judge(
    found: Sequence[Mistake],
    *,
    num_gradients: int,
    unlike_eager: bool = False,
    eager_differs: bool = False,
) -> tuple[Results, str]:
    """The verdict on the results, and a text about wrong ones: `72 of 73 gradients, 12 buffers`.

    `unlike_eager`: the comparison was with the method's own graph, since eager's results differ.
    `eager_differs`: eager differs from itself, and `found` has what is beyond that.
    """
    if not found:
        why = EAGER_DIFFERS if eager_differs else ""
        return (Results.UNLIKE_EAGER if unlike_eager else Results.EXACT), why
    wrong = list(dict.fromkeys(mistake.name for mistake in found if mistake.wrong))
    if not wrong:
        rounded = len({mistake.name for mistake in found if mistake.name.startswith(GRADIENT)})
        return Results.ROUNDED, f"rounding ({rounded} of {num_gradients} gradients)"
    gradients = sum(name.startswith(GRADIENT) for name in wrong)
    buffers = sum(name.startswith(BUFFER) for name in wrong)
    words = [f"{gradients} of {num_gradients} gradients"] if gradients else []
    words += [f"{buffers} buffer{'s' if buffers > 1 else ''}"] if buffers else []
    return Results.WRONG, ", ".join(words or wrong[:1])


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderTrial:
    """The measurements of a method and of eager in the same process.

    `mistakes` are against eager or, where the method compiles the model into other ops, against those
    ops run without recompute; then `unlike_eager`. Where `eager_differs` from itself, they are beyond that.
    """

    peak_bytes: int
    baseline_peak_bytes: int
    timing: Timing | None
    baseline_timing: Timing | None
    mistakes: tuple[Mistake, ...]
    unlike_eager: bool
    num_gradients: int
    eager_differs: bool = False

    @property
    def overhead(self) -> float | None:
        """The time that the method adds, as a fraction of eager's."""
        if self.timing is None or self.baseline_timing is None:
            return None
        return self.timing.added_to(self.baseline_timing)

    @property
    def noise(self) -> float | None:
        """The uncertainty of `overhead`."""
        if self.timing is None or self.baseline_timing is None:
            return None
        return self.timing.noise_beside(self.baseline_timing)

    @property
    def time_ratio(self) -> float | None:
        return None if self.overhead is None else 1 + self.overhead

    @property
    def judgement(self) -> tuple[Results, str]:
        """The verdict on the results, and a text about wrong ones: `72 of 73 gradients, 12 buffers`."""
        return judge(
            self.mistakes,
            num_gradients=self.num_gradients,
            unlike_eager=self.unlike_eager,
            eager_differs=self.eager_differs,
        )


def try_method(source: TargetSpec, method: Contender, *, timed_runs: int) -> ContenderTrial:
    """Try `method` on `source` in a fresh process; FreshProcessError where it fails there."""
    trial: ContenderTrial = run_fresh(
        "lowtide.experiments.trial:run_trial", source=source, method=method, timed_runs=timed_runs
    )
    return trial


def run_trial(
    *, source: TargetSpec | Target, method: Contender, timed_runs: int, steps: int = STEPS
) -> ContenderTrial:
    """The job of the fresh process."""
    target = source.load() if isinstance(source, TargetSpec) else source
    try:
        return _run(target, method, timed_runs, steps)
    except dynamo.BackendCompilerFailed as error:
        # its text starts with lines that do not name the error
        raise error.inner_exception from error


def _run(target: Target, method: Contender, timed_runs: int, steps: int) -> ContenderTrial:
    switch = switch_for(method, target)
    with tempfile.TemporaryDirectory(prefix="lowtide-") as folder:
        start = Start(target)
        expected = record(target, start, Path(folder) / "eager", steps)
        num_gradients = sum(name.startswith(GRADIENT) for name in results_in(expected[0]))
        switch.on()
        found = mistakes(target, start, expected)
        switch.off()
        own = own_differences(target, start, expected) if found else {}
        found = beyond(found, own) if own else found
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
    return ContenderTrial(
        peak_bytes=peak_bytes,
        baseline_peak_bytes=baseline_peak_bytes,
        timing=timing,
        baseline_timing=baseline_timing,
        mistakes=tuple(weighed(found, sensitivity)),
        unlike_eager=reference is not None,
        num_gradients=num_gradients,
        eager_differs=bool(own),
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
    above = peak_above_start(lambda: _step(target, STEPS_IN_LOOP), device=device)
    return static_bytes(target.model, target.batch, target.optimizer) + above


def _step(target: Target, steps: int = 1) -> None:
    train_steps(target.model, target.batch, target.optimizer, target.loss, steps=steps)
