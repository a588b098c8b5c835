"""Plans worth having: for every peak the cheapest that was ever seen.

One archive serves all budgets of a step. That is what makes planning monotone: a larger budget
chooses among more of the same plans.
"""

from bisect import bisect_right
from dataclasses import dataclass
from math import fsum

from lowtide.planning.search.runs import Rerun, Runs, added_seconds
from lowtide.planning.search.table import Table


@dataclass(frozen=True, slots=True)
class Entry:
    peak_bytes: int
    seconds: float
    plan: frozenset[Rerun]


class Archive:
    """The lower-left border of all recorded (peak, seconds), by rising peak and falling seconds."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.entries: list[Entry] = []

    def best(self, budget_bytes: int) -> Entry | None:
        """The cheapest plan whose peak is at most `budget_bytes`."""
        i = bisect_right(self.entries, budget_bytes, key=lambda e: e.peak_bytes)
        return self.entries[i - 1] if i else None

    def would_keep(self, peak_bytes: int, seconds: float) -> bool:
        there = self.best(peak_bytes)
        return there is None or seconds < there.seconds

    def record(self, runs: Runs) -> bool:
        """Keep the plan of `runs` if nothing at most as large is as cheap; True when kept."""
        peak_bytes = runs.peak_bytes()
        if not self.would_keep(peak_bytes, runs.added_seconds):
            return False
        return self.add(peak_bytes, runs.plan())

    def entry(self, runs: Runs) -> Entry:
        return self._entry(runs.peak_bytes(), runs.plan())

    def _entry(self, peak_bytes: int, plan: frozenset[Rerun]) -> Entry:
        # The simulator adds up in the same exact way: equal plans have equal seconds.
        seconds = fsum(added_seconds(self.table, plan))
        return Entry(peak_bytes, seconds, plan)

    def add(self, peak_bytes: int, plan: frozenset[Rerun]) -> bool:
        entry = self._entry(peak_bytes, plan)
        seconds = entry.seconds
        if not self.would_keep(peak_bytes, seconds):
            return False
        i = bisect_right(self.entries, peak_bytes, key=lambda e: e.peak_bytes)
        if i and self.entries[i - 1].peak_bytes == peak_bytes:
            i -= 1
        j = i
        while j < len(self.entries) and self.entries[j].seconds >= seconds:
            j += 1
        self.entries[i:j] = [entry]
        return True
