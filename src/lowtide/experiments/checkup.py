"""Does lowtide work on this machine? A small model is captured, timed, planned and verified."""

import statistics
from dataclasses import dataclass

from torch import cuda, device

from lowtide import api
from lowtide.facts import Step
from lowtide.profiling.device import device_for
from lowtide.report.records import relative_increase
from lowtide.zoo.build import build

MODEL, BATCH_SIZE = "tiny-transformer", 8
"""Dropout, attention and layer norm; needs no library but torch."""
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """One device. `predicted` and `measured` peaks are (without, with) the plan.

    `timing_noise`: the median change of an op's time from one profile to the next, each op weighed alike.
    """

    device: str
    identity: str
    num_ops: int
    timing_noise: float
    budget_bytes: int
    predicted_peak_bytes: tuple[int, int]
    measured_peak_bytes: tuple[int, int]
    exact: bool
    differences: tuple[str, ...]
    predicted_overhead: float
    measured_overhead: float | None
    fresh_process: bool
    notes: tuple[str, ...]

    @property
    def is_fine(self) -> bool:
        """Exact, within the budget, and as predicted to a percent."""
        pairs = zip(self.predicted_peak_bytes, self.measured_peak_bytes, strict=True)
        as_predicted = all(abs((relative_increase(*pair)) or 0.0) <= 0.01 for pair in pairs)
        return self.exact and self.measured_peak_bytes[1] <= self.budget_bytes and as_predicted


def why_not_run(name: str) -> str:
    """Why a device cannot be checked here; empty when it can."""
    return "" if name == "cpu" or cuda.is_available() else "torch sees no CUDA device here"


def check_device(name: str) -> Checkup:
    """Profile twice, to see how steady times are; plan half-way to the floor; verify in fresh processes."""
    made = build(MODEL, batch_size=BATCH_SIZE, device=name)
    first, second = (
        api.profile(made.model, made.batch, optimizer=made.optimizer, cache=False) for _ in range(2)
    )
    plan = second.plan((second.peak_bytes + second.floor_bytes) // 2)
    result = api.verify(made.model, made.batch, plan, optimizer=made.optimizer)
    return Checkup(
        device=name,
        identity=device_for(device(name)).identity,
        num_ops=len(second.nodes),
        timing_noise=_noise(first.step, second.step),
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=(plan.baseline_peak_bytes, plan.peak_bytes),
        measured_peak_bytes=(result.baseline_measured_peak_bytes, result.measured_peak_bytes),
        exact=result.exact,
        differences=result.differences,
        predicted_overhead=plan.overhead,
        measured_overhead=result.overhead,
        fresh_process=result.fresh_process,
        notes=second.step.notes,
    )


def _noise(first: Step, second: Step) -> float:
    changes = [
        abs(after.seconds - before.seconds) / max(after.seconds, before.seconds)
        for before, after in zip(first.nodes, second.nodes, strict=True)
        if before.seconds and after.seconds
    ]
    return statistics.median(changes) if changes else 0.0
