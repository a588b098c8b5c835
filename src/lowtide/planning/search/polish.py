"""Between two neighbours of the archive, exchange dear recomputes for cheaper ones.

The seconds of a plan in between stay between those of the neighbours, and the budgets looked at are
fixed by them, each starting from the plan of the one below: so a larger budget is never slower,
whichever budgets are asked for and in whatever order.
"""

from lowtide.planning.search.archive import Archive, Entry
from lowtide.planning.search.descent import refine
from lowtide.planning.search.runs import Runs

RUNGS = 3
ROUNDS = 2
TRIES = 40


class Polish:
    """The plans of an archive, made better where a budget asks for them."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self._runs: Runs | None = None
        self._rungs: dict[int, list[tuple[int, Entry]]] = {}

    def best(self, budget_bytes: int) -> Entry | None:
        """The cheapest plan whose peak is at most `budget_bytes`."""
        entry = self.archive.best(budget_bytes)
        if entry is None or entry is self.archive.entries[-1]:
            return entry
        if entry.peak_bytes not in self._rungs:
            self._rungs[entry.peak_bytes] = self._climb(entry)
        return [better for level, better in self._rungs[entry.peak_bytes] if level <= budget_bytes][-1]

    def _climb(self, entry: Entry) -> list[tuple[int, Entry]]:
        entries = self.archive.entries
        above = entries[entries.index(entry) + 1]
        if self._runs is None:
            self._runs = Runs(self.archive.table)
        found = [(entry.peak_bytes, entry)]
        best = entry
        for part in range(RUNGS):
            level = entry.peak_bytes + (above.peak_bytes - entry.peak_bytes) * part // RUNGS
            self._runs.go_to(best.plan)
            for _ in range(ROUNDS):
                if not refine(self._runs, level, tries=TRIES):
                    break
                better = self.archive.entry(self._runs)
                # A lower peak than the archive knows would make its floor untrue.
                if better.peak_bytes < entry.peak_bytes or better.seconds < above.seconds:
                    break
                best = better
            found.append((level, best))
        return found
