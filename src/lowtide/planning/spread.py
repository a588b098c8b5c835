"""Plans of a shorter step, spread over all blocks of the whole one, as places where the search begins.

Between two of them, a budget is used up by doing in some blocks as one says, and in the others as the other
one does. Only such pairs count between which no third plan is better than any mixture: with many blocks,
that is nearly as good as the best plan of all.
"""

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

from lowtide.planning.anneal.problem import Ints
from lowtide.planning.anneal.steps import StepProblem
from lowtide.planning.native.library import Figures
from lowtide.planning.representative import Representative
from lowtide.planning.search.runs import Rerun

Parts = list[list[Rerun]]

NUM_TRIES = 4
"""Mixtures of two plans that are tried for a budget."""


class Point(NamedTuple):
    """A spread plan with its figures in the whole step."""

    figures: Figures
    parts: Parts
    order: Ints

    @property
    def peak_bytes(self) -> int:
        return self.figures.peak_bytes

    @property
    def seconds(self) -> float:
        return self.figures.seconds


class Spread:
    """The plans of one shorter step in the whole one. `num_ops` are what there is to search for: the ops
    without the copies that follow them."""

    def __init__(
        self, found: Representative, short: StepProblem, whole: StepProblem, orders: Iterable[Ints]
    ) -> None:
        self._whole = whole
        self.num_ops = len(short.problem.seconds)
        self._mixed: dict[int, Point | None] = {}
        self._all = [found.spread(short.plan(order), short.table, whole.table) for order in orders]

    @cached_property
    def points(self) -> list[Point]:
        """All plans, by their peaks."""
        return sorted((self._point(parts) for parts in self._all), key=lambda p: (p.peak_bytes, p.seconds))

    def mixed(self, budget_bytes: int) -> Point | None:
        """The plan that uses a budget up, of those that are mixed from the two around it."""
        if budget_bytes not in self._mixed:
            below = [point for point in self._best if point.peak_bytes <= budget_bytes]
            above = [point for point in self._best if point.peak_bytes > budget_bytes]
            if below and above:
                self._mixed[budget_bytes] = self._mixture(below[-1], above[0], budget_bytes)
            else:
                self._mixed[budget_bytes] = below[-1] if below else None
        return self._mixed[budget_bytes]

    def _mixture(self, below: Point, above: Point, budget_bytes: int) -> Point:
        found = below
        low, high, most = 0, len(above.parts) - 1, above.peak_bytes
        for _ in range(NUM_TRIES):
            # bytes grow about evenly from block to block
            share = (budget_bytes - found.peak_bytes) / (most - found.peak_bytes)
            middle = low + int((high - low) * share)
            if middle == low:
                break
            point = self._point([below.parts[0], *above.parts[1 : 1 + middle], *below.parts[1 + middle :]])
            if point.peak_bytes <= budget_bytes:
                low, found = middle, point
            else:
                high, most = middle, point.peak_bytes
        return found

    @cached_property
    def _best(self) -> list[Point]:
        """Those that no mixture of two others beats."""
        found: list[Point] = []
        for point in self.points:
            if found and point.seconds >= found[-1].seconds:
                continue
            while len(found) > 1 and _slope(found[-2], found[-1]) >= _slope(found[-1], point):
                found.pop()
            found.append(point)
        return found

    def _point(self, parts: Parts) -> Point:
        order = self._whole.sequence({run for part in parts for run in part})
        return Point(self._whole.problem.evaluate(order, 0), parts, order)


def _slope(one: Point, two: Point) -> float:
    """Seconds for each byte; less than none, since more bytes take fewer seconds."""
    return (two.seconds - one.seconds) / max(1, two.peak_bytes - one.peak_bytes)
