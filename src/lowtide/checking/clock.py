"""Time of a step: warm-up, then every run by itself, synchronised."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from lowtide.profiling.device import device_for
from lowtide.profiling.faults import page_fault_seconds, page_faults


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of each timed run, in the order they ran.

    On a CPU, `page_faults` are the pages that each took from the system, and `page_fault_seconds` is what one
    costs there, measured apart.
    """

    runs: tuple[float, ...]
    page_faults: tuple[int, ...] = ()
    page_fault_seconds: float = 0.0

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.runs)

    @property
    def spread_seconds(self) -> float:
        """Distance between the quartiles: what lies between the middle half of the runs."""
        if len(self.runs) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.runs, n=4, method="inclusive")
        return high - low

    @property
    def median_page_faults(self) -> int:
        return round(statistics.median(self.page_faults)) if self.page_faults else 0

    @property
    def fault_share(self) -> float:
        """About how much of the time went into page faults."""
        return self.median_page_faults * self.page_fault_seconds / self.median_seconds

    def added_to(self, baseline: "Timing") -> float:
        """Share of `baseline`'s time that this adds, from the two medians: what stands beside them."""
        return self.median_seconds / baseline.median_seconds - 1

    def noise_beside(self, baseline: "Timing") -> float | None:
        """How far off `added_to` may be; None for a single run, which cannot tell.

        By the runs that followed each other, since a slow moment of the machine hits both of a pair: half
        the distance between the quartiles of their ratios, and how far their median is from `added_to`.
        """
        if len(self.runs) < 2:
            return None
        ratios = Timing(tuple(mine / other for mine, other in zip(self.runs, baseline.runs, strict=True)))
        return ratios.spread_seconds / 2 + abs(ratios.median_seconds - 1 - self.added_to(baseline))


def time_steps(
    steps: Mapping[str, Callable[[], object]], *, device: torch.device, warm_up: int = 1, runs: int = 5
) -> dict[str, Timing]:
    """Time several steps in turn (a, b, a, b, ...), so that a slow moment of the machine hits all alike."""
    for _ in range(warm_up):
        for step in steps.values():
            step()
    clock = device_for(device)
    on_cpu = device.type == "cpu"
    fault_seconds = page_fault_seconds() if on_cpu else 0.0
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    faults: dict[str, list[int]] = {name: [] for name in steps}
    for _ in range(runs):
        for name, step in steps.items():
            before = page_faults()
            seconds[name].append(clock.timed(step)[1].seconds)
            if on_cpu:
                faults[name].append(page_faults() - before)
    return {name: Timing(tuple(seconds[name]), tuple(faults[name]), fault_seconds) for name in steps}
