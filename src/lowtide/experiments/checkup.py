"""Does lowtide work on this machine? A small model is captured, timed, planned and verified; then once more
with values that wait in a store."""

import statistics
import tempfile
from dataclasses import dataclass, replace

from torch import cuda, device

from lowtide import api
from lowtide.facts import Action, Link, Step
from lowtide.profiles import Profile
from lowtide.profiling.device import device_for
from lowtide.report.records import relative_increase
from lowtide.zoo.build import Built, build

MODEL, BATCH_SIZE = "tiny-transformer", 8
"""Dropout, attention and layer norm; needs no library but torch."""
DEVICES = ("cpu", "cuda")
FREE = 1e15
"""Bytes per second of a store that costs nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapCheckup:
    """A step whose plan offloads as much as it can, whatever that costs here. `link`: as fast as measured."""

    link: Link
    num_offloaded: int
    budget_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    exact: bool
    differences: tuple[str, ...]

    @property
    def is_fine(self) -> bool:
        """Values left for the store, came back with the same bits, and took no room in between."""
        within = self.measured_peak_bytes <= self.budget_bytes
        return self.exact and within and self.num_offloaded > 0


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
    swap: SwapCheckup

    @property
    def is_fine(self) -> bool:
        """Exact, within the budget, and as predicted to a percent; with swap as well."""
        pairs = zip(self.predicted_peak_bytes, self.measured_peak_bytes, strict=True)
        as_predicted = all(abs((relative_increase(*pair)) or 0.0) <= 0.01 for pair in pairs)
        within = self.measured_peak_bytes[1] <= self.budget_bytes
        return self.exact and within and as_predicted and self.swap.is_fine


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
        swap=_check_swap(name, made),
    )


def _check_swap(name: str, made: Built) -> SwapCheckup:
    """Plan as if transfers took no time, so that values do leave for the store, and verify that plan."""
    with tempfile.TemporaryDirectory(prefix="lowtide-") as folder:
        swap = f"disk:{folder}" if name == "cpu" else "host"
        found = api.profile(made.model, made.batch, optimizer=made.optimizer, swap=swap, cache=False)
        link = found.step.link
        assert link is not None
        free = replace(link, write_bytes_per_second=FREE, read_bytes_per_second=FREE, latency_seconds=0.0)
        eager_to_swap = Profile(replace(found.step, link=free))
        plan = eager_to_swap.plan((eager_to_swap.peak_bytes + eager_to_swap.floor_bytes) // 2)
        result = api.verify(made.model, made.batch, plan, optimizer=made.optimizer)
    return SwapCheckup(
        link=replace(link, store=swap.partition(":")[0]),
        num_offloaded=sum(decision.action is Action.OFFLOAD for decision in plan.decisions),
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        measured_peak_bytes=result.measured_peak_bytes,
        exact=result.exact,
        differences=result.differences,
    )


def _noise(first: Step, second: Step) -> float:
    changes = [
        abs(after.seconds - before.seconds) / max(after.seconds, before.seconds)
        for before, after in zip(first.nodes, second.nodes, strict=True)
        if before.seconds and after.seconds
    ]
    return statistics.median(changes) if changes else 0.0
