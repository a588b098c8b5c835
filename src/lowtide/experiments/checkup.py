"""Check that lowtide works on this machine: capture and time a small model, verify a plan for it, and verify
a plan that offloads values. A failed check does not stop the others."""

import statistics
from dataclasses import dataclass, replace

from torch import device

from lowtide import api
from lowtide.facts import Action, Step, TransferSpeed
from lowtide.facts.files import temporary_folder
from lowtide.plans import Plan
from lowtide.profiles import Profile
from lowtide.profiling.devices import device_for
from lowtide.report.results import relative_increase
from lowtide.verification.verdict import PREDICTED_WITHIN
from lowtide.verification.verify_plan import Verification
from lowtide.zoo.build import Built, build

MODEL, BATCH_SIZE = "tiny-transformer", 8
"""Dropout, attention and layer norm; needs no library but torch."""
FREE = 1e15
"""Bytes per second of a store that costs nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureCheckup:
    """A model on one device, captured and timed.

    `timing_noise`: the median change of an op's time from one profile to the next, all ops weighted equally.
    `free_bytes`: memory of an accelerator; None for the CPU.
    """

    identity: str
    free_bytes: int | None
    num_ops: int
    timing_noise: float
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCheckup:
    """A plan, predicted and measured. Peaks are (without, with) the plan."""

    budget_bytes: int
    predicted_peak_bytes: tuple[int, int]
    measured_peak_bytes: tuple[int, int]
    exact: bool
    differences: tuple[str, ...]
    predicted_overhead: float
    measured_overhead: float | None
    noise: float | None
    fresh_process: bool

    @property
    def is_fine(self) -> bool:
        """Exact, and the budget is kept: the measured peak is at or below it, and predicted peaks are within
        1 % of the measured ones."""
        pairs = zip(self.measured_peak_bytes, self.predicted_peak_bytes, strict=True)
        as_predicted = all(abs((relative_increase(*pair)) or 0.0) <= PREDICTED_WITHIN for pair in pairs)
        return self.exact and self.measured_peak_bytes[1] <= self.budget_bytes and as_predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadCheckup:
    """A step whose plan offloads as much as it can, at any cost. `link`: the measured speed."""

    link: TransferSpeed
    num_offloaded: int
    budget_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    exact: bool
    differences: tuple[str, ...]

    @property
    def is_fine(self) -> bool:
        """Values were offloaded and freed, and results are exact."""
        within = self.measured_peak_bytes <= self.budget_bytes
        return self.exact and within and self.num_offloaded > 0


def check_capture(name: str) -> tuple[CaptureCheckup, Built, Profile]:
    """Profile twice, to see how far times vary. The other checks use the model and its profile."""
    made = build(MODEL, batch_size=BATCH_SIZE, device=name)
    first, second = (
        api.profile(made.model, made.batch, optimizer=made.optimizer, cache=False) for _ in range(2)
    )
    found = CaptureCheckup(
        identity=device_for(device(name)).identity,
        free_bytes=device_for(device(name)).free_bytes(),
        num_ops=len(second.nodes),
        timing_noise=_noise(first.step, second.step),
        notes=second.step.notes,
    )
    return found, made, second


def check_plan(made: Built, profile: Profile) -> PlanCheckup:
    """Plan half-way to the floor; verify in fresh processes."""
    plan, result = _verified(made, profile)
    return PlanCheckup(
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=(plan.baseline_peak_bytes, plan.peak_bytes),
        measured_peak_bytes=(result.baseline_measured_peak_bytes, result.measured_peak_bytes),
        exact=result.exact,
        differences=result.differences,
        predicted_overhead=plan.overhead,
        measured_overhead=result.overhead,
        noise=result.noise,
        fresh_process=result.fresh_process,
    )


def check_offload(name: str, made: Built) -> OffloadCheckup:
    """Plan as if transfers took no time, so that the plan does offload values, and verify that plan."""
    with temporary_folder() as folder:
        offload = f"disk:{folder}" if name == "cpu" else "host"
        found = api.profile(made.model, made.batch, optimizer=made.optimizer, offload=offload, cache=False)
        link = found.step.transfer_speed
        assert link is not None
        free = replace(link, write_bytes_per_second=FREE, read_bytes_per_second=FREE, latency_seconds=0.0)
        plan, result = _verified(made, Profile(replace(found.step, transfer_speed=free)), timed_runs=0)
    return OffloadCheckup(
        link=replace(link, store=offload.partition(":")[0]),
        num_offloaded=sum(decision.action is Action.OFFLOAD for decision in plan.decisions),
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        measured_peak_bytes=result.measured_peak_bytes,
        exact=result.exact,
        differences=result.differences,
    )


def _verified(made: Built, profile: Profile, *, timed_runs: int | None = None) -> tuple[Plan, Verification]:
    plan = profile.plan((profile.peak_bytes + profile.floor_bytes) // 2)
    return plan, api.verify(made.model, made.batch, plan, optimizer=made.optimizer, timed_runs=timed_runs)


def _noise(first: Step, second: Step) -> float:
    changes = [
        abs(after.seconds - before.seconds) / max(after.seconds, before.seconds)
        for before, after in zip(first.nodes, second.nodes, strict=True)
        if before.seconds and after.seconds
    ]
    return statistics.median(changes) if changes else 0.0
