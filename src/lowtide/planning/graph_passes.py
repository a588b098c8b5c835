"""The passes of the graphs of a step, what a schedule of a graph needs in them, and the expected peak."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.facts import GraphRun


@dataclass(frozen=True, slots=True, order=True)
class PricedSchedule:
    """One schedule of a graph: the seconds that it adds, the bytes that it saves for the backward pass, and
    the peaks of its two passes."""

    seconds: float
    saved_bytes: int
    backward_bytes: int
    forward_bytes: int
    schedule: tuple[GraphRun, ...]


@dataclass(frozen=True, slots=True)
class GraphPass:
    """One pass of one graph (-1 for the optimizer): the bytes that no schedule changes, and the graphs whose
    saved values wait for their backward pass."""

    base_bytes: int
    graph: int
    is_backward: bool
    waiting: tuple[int, ...]


class ExpectedPeaks:
    """The peak of a step of `num_graphs` graphs, from these `passes` and a schedule for each graph."""

    def __init__(self, passes: Sequence[GraphPass], num_graphs: int) -> None:
        self._base = np.array([one.base_bytes for one in passes], dtype=np.int64)
        self._waiting = np.zeros((len(passes), num_graphs), dtype=np.int64)
        for place, one in enumerate(passes):
            self._waiting[place, list(one.waiting)] = 1
        own = [(place, one) for place, one in enumerate(passes) if one.graph >= 0]
        self._forward = [(place, one.graph) for place, one in own if not one.is_backward]
        self._backward = [(place, one.graph) for place, one in own if one.is_backward]

    def of(self, schedules: Sequence[PricedSchedule]) -> int:
        saved = np.array([schedule.saved_bytes for schedule in schedules], dtype=np.int64)
        need = self._base + self._waiting @ saved
        for place, graph in self._forward:
            need[place] += schedules[graph].forward_bytes
        for place, graph in self._backward:
            need[place] += schedules[graph].backward_bytes
        return int(need.max())
