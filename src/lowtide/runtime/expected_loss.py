"""Leave room for a loss that nobody has told of, until the first step shows what it holds.

What is expected is a cross-entropy of all that the model returns: it holds the logarithms of the shares,
their gradient, and that of the outputs at once. Other common losses hold less.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from lowtide.errors import BudgetTooSmall
from lowtide.facts import Graph, GraphRun, Step
from lowtide.planning.repeated_graphs import planner_for
from lowtide.planning.schedules import runs_of_schedules
from lowtide.planning.simulate import simulate
from lowtide.plans import Plan

TIMES_OUTPUTS = 3


class Room:
    """The `graphs` of a plan with schedules that leave `loss_bytes` to the loop's loss, and still fit."""

    def __init__(self, step: Step, told: Sequence[Graph], *, loss_bytes: int, budget_bytes: int) -> None:
        self.loss_bytes = loss_bytes
        self.graphs: tuple[Graph, ...] = ()
        self._step = step
        self._told = told
        self._budget_bytes = budget_bytes

    @classmethod
    def for_loss(cls, plan: Plan, graphs: Sequence[Graph]) -> Self | None:
        """None where the plan has that room as it is, or cannot have it; and where nobody looks at the first
        step, or the plan has to be as the user asked."""
        step, solution = plan.step, plan.solution
        is_free = solution.planner == "auto" and not solution.eager and not solution.step_in_backward
        if step is None or step.device != "cpu" or step.transfer_speed is not None or not is_free:
            return None
        loss_bytes = TIMES_OUTPUTS * graphs[-1].tangent_bytes
        room = cls(step, graphs, loss_bytes=loss_bytes, budget_bytes=plan.budget_bytes)
        if room.is_not_needed(loss_bytes):
            return None
        return room if room.find() else None

    def is_not_needed(self, loss_bytes: int) -> bool:
        """Whether the plan as it was made fits where the loop's loss holds as much."""
        step = _with_loss(self._step, loss_bytes)
        releases = [graph.releases for graph in self._told]
        return (
            simulate(step, runs_of_schedules(step, self._schedules, releases)).peak_bytes
            <= self._budget_bytes
        )

    def find(self) -> bool:
        """Look for such schedules: those of the plan, mended, or others; False where none fit."""
        desk = planner_for(_with_loss(self._step, self.loss_bytes))
        adapted = desk.adapt(self._schedules, budget_bytes=self._budget_bytes)
        if adapted is not None and adapted.peak_bytes <= self._budget_bytes:
            self.graphs = adapted.graphs[: len(self._told)]
            return True
        try:
            self.graphs = desk.solve(budget_bytes=self._budget_bytes).graphs[: len(self._told)]
        except BudgetTooSmall:
            return False
        return True

    @property
    def _schedules(self) -> list[tuple[GraphRun, ...]]:
        """Of the loss's own graphs there is none."""
        rest = len(self._step.graphs) - len(self._told)
        return [graph.schedule for graph in self._told] + [()] * rest


def _with_loss(step: Step, loss_bytes: int) -> Step:
    end = step.nodes[step.first_backward_rank - 1]
    nodes = list(step.nodes)
    nodes[end.rank] = replace(end, workspace_bytes=max(end.workspace_bytes, loss_bytes))
    return replace(step, nodes=tuple(nodes))
