"""Which part of a store belongs to whom."""

from bisect import insort
from collections import deque

PAGE_BYTES = 4096


def whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class Slots:
    """Parts of a line of bytes, each taken from the first gap that is large enough, else at the end.

    `give_back` may be called at any moment and by any thread, as when something is collected; all else by
    one thread at a time.
    """

    def __init__(self) -> None:
        self.end = 0
        """how far the parts reach that were ever taken"""
        self._gaps: list[tuple[int, int]] = []
        self._returned: deque[tuple[int, int]] = deque()

    def take(self, nbytes: int) -> int:
        """The start of a part of so many bytes."""
        nbytes = whole_pages(nbytes)
        self._collect()
        for index, (start, size) in enumerate(self._gaps):
            if size >= nbytes:
                self._gaps[index : index + 1] = [(start + nbytes, size - nbytes)] if size > nbytes else []
                return start
        start = self.end
        if self._gaps and sum(self._gaps[-1]) == self.end:
            start, _ = self._gaps.pop()
        self.end = start + nbytes
        return start

    def give_back(self, start: int, nbytes: int) -> None:
        self._returned.append((start, whole_pages(nbytes)))

    def _collect(self) -> None:
        while self._returned:
            insort(self._gaps, self._returned.popleft())
        merged: list[tuple[int, int]] = []
        for start, size in self._gaps:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self._gaps = merged
