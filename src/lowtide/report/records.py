"""What the report shows besides facts: measured results and how they were measured.

All of them are plain frozen records, so that any command can fill them and any section of the
report can be left out. None stands for "not measured"; it is never shown as a number.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from lowtide.facts import Action, Solution


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasurement:
    """One way to run the step: its predicted (simulated) and its measured figures.

    `seconds_spread` is the distance between the first and the third quartile of the step's time.
    """

    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    seconds_median: float | None = None
    seconds_spread: float | None = None

    @property
    def is_measured(self) -> bool:
        return self.measured_peak_bytes is not None

    @property
    def peak_bytes(self) -> int | None:
        """The measured peak, else the predicted one."""
        return self.measured_peak_bytes if self.is_measured else self.predicted_peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The step without and with the plan, run side by side.

    `overhead` is the share of the plain step's measured time that the plan adds, by pairs of runs in
    turn: near the ratio of the two medians, and steadier. `exact` is None where nobody compared.
    `differences` name what was not equal to the last bit. `recompute_exact`: it is equal to the
    captured graph without any recompute, so that the plan is not to blame for differences.
    """

    baseline: StepMeasurement
    planned: StepMeasurement
    overhead: float | None = None
    exact: bool | None = None
    recompute_exact: bool | None = None
    differences: tuple[str, ...] = ()
    method: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """How it was measured. `versions` are (name, version) pairs in the order to show them."""

    command: str = ""
    date: str = ""
    machine: str = ""
    versions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One batch size, without (`baseline`) and with (`planned`) recompute.

    `status` is "measured", "plan measured" (the plain step is too large for the machine), "predicted
    only", "does not fit: why" or "failed: why". `overhead`, `exact` and `recompute_exact` are as in
    `Measurement`; `predicted_overhead` is recompute time over the plain step's time.
    """

    batch_size: int
    budget_bytes: int | None
    baseline: StepMeasurement
    planned: StepMeasurement
    overhead: float | None = None
    exact: bool | None = None
    status: str = "measured"
    predicted_overhead: float | None = None
    recompute_exact: bool | None = None

    @property
    def peaks(self) -> tuple[int | None, int | None]:
        """Peaks without and with: both measured, or else both predicted, never one of each."""
        measured = (self.baseline.measured_peak_bytes, self.planned.measured_peak_bytes)
        if None not in measured:
            return measured
        return self.baseline.predicted_peak_bytes, self.planned.predicted_peak_bytes

    @property
    def reduction(self) -> float | None:
        """Share of the peak that the plan saves, 0.25 for a quarter."""
        before, after = self.peaks
        return 1 - after / before if before and after is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRow:
    """One method of saving memory. `verdict`: "exact", "gradients wrong", "crashed: why" ..."""

    method: str
    peak_bytes: int | None = None
    time_ratio: float | None = None
    verdict: str = ""

    @property
    def exact(self) -> bool:
        return self.verdict == "exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeoffPoint:
    """One plan of the curve. `recomputed` names the activations that it makes again."""

    peak_bytes: int
    recompute_seconds: float
    recomputed: tuple[str, ...] = ()
    measured_peak_bytes: int | None = None
    measured_overhead: float | None = None


def tradeoff_points(solutions: Iterable[Solution]) -> list[TradeoffPoint]:
    """The points of a curve, by falling peak. Budgets that gave the same plan give one point."""
    points = {
        (solution.peak_bytes, solution.recompute_seconds): TradeoffPoint(
            peak_bytes=solution.peak_bytes,
            recompute_seconds=solution.recompute_seconds,
            recomputed=tuple(d.name for d in solution.decisions if d.action is Action.RECOMPUTE),
        )
        for solution in solutions
    }
    return sorted(points.values(), key=lambda point: (-point.peak_bytes, point.recompute_seconds))


def relative_increase(before: float | None, after: float | None) -> float | None:
    """`after` over `before`, less one; None where either is unknown."""
    return after / before - 1 if before and after is not None else None
