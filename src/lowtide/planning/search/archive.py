"""The Pareto front of peaks and seconds: for every peak the cheapest schedule that was ever seen.

One archive serves all budgets of a step. That makes planning monotone: a larger budget chooses among more
of the same schedules.
"""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from lowtide.planning.search.problem import Ints


@dataclass(frozen=True, slots=True, eq=False)
class ArchiveEntry:
    """A schedule as a sequence of ops of the step's problem."""

    peak_bytes: int
    seconds: float
    order: Ints

    @property
    def price(self) -> float:
        return self.seconds


class Planned(Protocol):
    """Anything with a peak and a price: the seconds that it adds, and a tie-break."""

    @property
    def peak_bytes(self) -> int: ...
    @property
    def price(self) -> Any: ...


Some = TypeVar("Some", bound=Planned)


class Archive(Generic[Some]):
    """The Pareto front of all recorded (peak, price), by rising peak and falling price."""

    def __init__(self) -> None:
        self.entries: list[Some] = []

    def best(self, budget_bytes: int) -> Some | None:
        """The cheapest entry whose peak is at most `budget_bytes`."""
        i = bisect_right(self.entries, budget_bytes, key=lambda e: e.peak_bytes)
        return self.entries[i - 1] if i else None

    def above(self, budget_bytes: int) -> Some | None:
        """The entry with the lowest peak above `budget_bytes`."""
        i = bisect_right(self.entries, budget_bytes, key=lambda e: e.peak_bytes)
        return self.entries[i] if i < len(self.entries) else None

    def replace(self, entry: Some, by: Some) -> None:
        """Put another one in the place of `entry`."""
        self.entries.remove(entry)
        self.add(by)

    def add(self, entry: Some) -> bool:
        """Keep an entry if none with at most its peak is as cheap; True when kept."""
        there = self.best(entry.peak_bytes)
        if there is not None and there.price <= entry.price:
            return False
        i = bisect_right(self.entries, entry.peak_bytes, key=lambda e: e.peak_bytes)
        if i and self.entries[i - 1].peak_bytes == entry.peak_bytes:
            i -= 1
        j = i
        while j < len(self.entries) and self.entries[j].price >= entry.price:
            j += 1
        self.entries[i:j] = [entry]
        return True
