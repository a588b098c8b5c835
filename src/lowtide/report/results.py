"""Measured results, and when and with which versions they were measured, for the report.

All are plain frozen records: any command can fill them, and any section of the report can be left out. None
means "not measured" and is never shown as a number.
"""

import datetime
import platform
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version


class SweepStatus(StrEnum):
    """The outcome of one batch size."""

    MEASURED = "measured"
    PLAN_MEASURED = "plan measured"
    PREDICTED = "predicted only"
    TOO_SMALL = "does not fit"
    FAILED = "failed"
    PENDING = "not run yet"


class Results(StrEnum):
    """A method's results compared with eager training, or why there are none."""

    EXACT = "exact"
    UNLIKE_EAGER = "recompute exact, unlike eager"
    ROUNDED = "not exact"
    WRONG = "wrong"
    CRASHED = "crashed"
    NOT_APPLICABLE = "not applicable"
    NOT_REACHED = "does not reach it"
    PENDING = "not run yet"


def with_why(status: str, why: str) -> str:
    """`failed: out of memory`, as tables and CSV files show it."""
    return f"{status}: {why}" if why else str(status)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasurement:
    """One way to run the step: its predicted (simulated) and its measured figures.

    `resident_peak_bytes` is the kernel's figure beside torch's own count, `reserved_peak_bytes` what the
    allocator of an accelerator reserved. `seconds_spread` is the
    distance between the first and the third quartile of the step's time.
    """

    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    resident_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
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
    """The step without and with the plan, run in turn in one process.

    `noise` is the uncertainty of `overhead`, None for a single run. `exact` is None where results were not
    compared. `differences` name the tensors that differ. `recompute_exact`: results equal those of the
    captured graph without recompute, so the plan does not cause the differences. `eager_differences`: where
    eager differs from itself, which is not the plan's. `notes` say where peaks disagree, and why.
    `rounding`: how far the results of a plan that rounds are from eager; `exact` is None then, unless more
    than rounding differs.
    """

    baseline: StepMeasurement
    planned: StepMeasurement
    noise: float | None = None
    exact: bool | None = None
    recompute_exact: bool | None = None
    differences: tuple[str, ...] = ()
    eager_differences: tuple[str, ...] = ()
    method: str = ""
    notes: tuple[str, ...] = ()
    rounding: str = ""

    @property
    def overhead(self) -> float | None:
        """Share of the baseline's measured time that the plan adds."""
        return relative_increase(self.baseline.seconds_median, self.planned.seconds_median)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The environment of a measurement. `versions` are (name, version) pairs in the order to show them."""

    command: str = ""
    date: str = ""
    machine: str = ""
    versions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One batch size, without (`baseline`) and with (`planned`) recompute.

    `why` says why it does not fit or failed. `noise`, `exact` and `recompute_exact` are as in
    `Measurement`; `predicted_overhead` is recompute time over the baseline's time.
    """

    batch_size: int
    budget_bytes: int | None
    baseline: StepMeasurement
    planned: StepMeasurement
    noise: float | None = None
    exact: bool | None = None
    status: SweepStatus = SweepStatus.MEASURED
    why: str = ""
    predicted_overhead: float | None = None
    recompute_exact: bool | None = None

    @property
    def status_text(self) -> str:
        return with_why(self.status, self.why)

    @property
    def overhead(self) -> float | None:
        """Share of the baseline's measured time that the plan adds."""
        return relative_increase(self.baseline.seconds_median, self.planned.seconds_median)

    @property
    def peaks(self) -> tuple[int | None, int | None]:
        """Peaks without and with the plan: both measured, else both predicted."""
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
    """One method of saving memory; `why` says what is wrong or what went wrong.

    `noise` is the uncertainty of `time_ratio`, as a fraction of eager's time.
    """

    method: str
    verdict: Results
    why: str = ""
    peak_bytes: int | None = None
    time_ratio: float | None = None
    noise: float | None = None

    @property
    def exact(self) -> bool:
        return self.verdict is Results.EXACT

    @property
    def verdict_text(self) -> str:
        return with_why(self.verdict, self.why)


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeoffPoint:
    """One plan of the curve. `recomputed` and `offloaded` name the activations that a plan recomputes and
    offloads.

    `measured_noise` is the uncertainty of `measured_overhead`. No plan with this peak adds less than
    `lower_bound_seconds`.
    """

    peak_bytes: int
    recompute_seconds: float
    recomputed: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    lower_bound_seconds: float | None = None
    measured_peak_bytes: int | None = None
    measured_overhead: float | None = None
    measured_noise: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerCurve:
    """The points of one planner, by falling peak."""

    planner: str
    points: tuple[TradeoffPoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPoint:
    """One budget: the share of the baseline's time that each planner's plan adds, None where it has no plan
    within; and the share below which no plan is (`bound`)."""

    budget_bytes: int
    overheads: tuple[tuple[str, float | None], ...]
    bound: float | None = None


def relative_increase(before: float | None, after: float | None) -> float | None:
    """`after` over `before`, less one; None where either is unknown."""
    return after / before - 1 if before and after is not None else None


def environment_here(*, machine: str, command: str = "") -> Environment:
    """The environment of this process: time, system, versions of libraries."""
    return Environment(
        command=command,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        machine=f"{machine}, {platform.system()} {platform.machine()}",
        versions=(("python", platform.python_version()), *_versions("lowtide", "torch", "transformers")),
    )


def _versions(*names: str) -> list[tuple[str, str]]:
    found = []
    for name in names:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue  # an optional library that is not installed
    return found
