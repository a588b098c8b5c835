"""Plans worth having: for every peak the cheapest that was ever seen.

One archive serves all budgets of a step. That is what makes planning monotone: a larger budget
chooses among more of the same plans.
"""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from lowtide.planning.search.problem import Ints


@dataclass(frozen=True, slots=True, eq=False)
class ArchiveEntry:
    """A plan as a sequence of ops of the step's problem."""

    peak_bytes: int
    seconds: float
    order: Ints

    @property
    def price(self) -> float:
        return self.seconds


class Planned(Protocol):
    """Whatever has a peak and a price: the seconds that it adds, and what decides between equal ones."""

    @property
    def peak_bytes(self) -> int: ...
    @property
    def price(self) -> Any: ...


Some = TypeVar("Some", bound=Planned)


class Archive(Generic[Some]):
    """The lower-left border of all recorded (peak, price), by rising peak and falling price."""

    def __init__(self) -> None:
        self.entries: list[Some] = []

    def best(self, budget_bytes: int) -> Some | None:
        """The cheapest plan whose peak is at most `budget_bytes`."""
        i = bisect_right(self.entries, budget_bytes, key=lambda e: e.peak_bytes)
        return self.entries[i - 1] if i else None

    def above(self, budget_bytes: int) -> Some | None:
        """The plan with the lowest peak above `budget_bytes`."""
        i = bisect_right(self.entries, budget_bytes, key=lambda e: e.peak_bytes)
        return self.entries[i] if i < len(self.entries) else None

    def replace(self, entry: Some, by: Some) -> None:
        """Have another plan instead of `entry`."""
        self.entries.remove(entry)
        self.add(by)

    def add(self, entry: Some) -> bool:
        """Keep a plan if nothing at most as large is as cheap; True when kept."""
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
