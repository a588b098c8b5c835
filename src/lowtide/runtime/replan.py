"""Plan graphs that come after a plan was applied: other batch shapes, other settings."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from torch import nn

from lowtide.errors import BudgetTooSmall
from lowtide.facts import Graph, Step
from lowtide.optim.step_in_backward import StepInBackward
from lowtide.planning.planner import Planner, StepSchedules
from lowtide.planning.repeated_graphs import planner_for
from lowtide.plans import Plan
from lowtide.runtime.backend import GraphSchedule
from lowtide.runtime.call_schedules import CallSoFar, by_fingerprint
from lowtide.runtime.counted_loop import PLANNED_GRAPHS, structures
from lowtide.runtime.executor import (
    EAGER_OPS,
    Executor,
    InductorOps,
    nearest_compiled,
    solve_compiled,
)
from lowtide.runtime.incomplete_steps import (
    BesideGraphs,
    as_in,
    growth,
    lowest_schedules,
    optimizer_of,
    schedules_of,
    step_of,
    step_of_call,
)
from lowtide.runtime.seen_loop import SeenLoop
from lowtide.torch_compat.dynamo import StartOver
from lowtide.trace.identity import identify_model, why_unknown
from lowtide.trace.segments import Segment
from lowtide.units import format_size, size_and_bytes

logger = logging.getLogger("lowtide")

CALLS_DO_NOT_FIT = (
    "the %d calls of the model before a backward pass take up to %s together, by the lowest plan that was "
    "found, and the budget is %s: the peak can be higher than the budget. Call the model with smaller "
    "batches, run backward() after each call, or plan for a budget of %d bytes"
)


class Replanner(SeenLoop):
    """The schedule of every graph: from the plan, or from a new solution for the same budget.

    Where a call begins with an unknown graph, the whole step is planned (`plan_call`), unless it is a known
    step with other shapes. A later unknown graph of a call is planned beside the graphs that have run.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        *,
        updates: StepInBackward | None = None,
        executor: Executor = EAGER_OPS,
    ) -> None:
        super().__init__(plan, model, updates=updates, executor=executor)
        self.identity = identify_model(model)
        self._model_bytes = _model_bytes(model)
        self._told_of_executor = self._told_of_calls = False

    def schedules_of(self, segment: Segment, so_far: CallSoFar) -> tuple[GraphSchedule, ...]:
        kind = self._structures[segment.fingerprint] = segment.structure
        graphs = self._known(segment.fingerprint)
        if not graphs:
            cause = self._dropped.get(segment.fingerprint) or why_unknown(segment, self.first)
            like, graph = self._alike.get(kind), None
            if so_far.nothing_ran and so_far.is_whole:
                graph = self._as_one_graph(segment, like, cause)
            if graph is None and so_far.nothing_ran:
                raise StartOver(cause)
            if graph is None:
                graph = self._beside_others(segment, like, so_far, cause)
            graphs = (graph,)
            self._remember_graph(segment.fingerprint, graphs)
        self._alike[kind] = graphs[-1]
        return tuple(map(GraphSchedule.of, graphs))

    def _known(self, fingerprint: str) -> tuple[Graph, ...]:
        """A planned graph, once for each of its runs in a call; empty for an unknown one."""
        # the last solution counts: the other graphs of that step were planned with this schedule
        return self.later.get(fingerprint) or self.graphs.get(fingerprint, ())

    def _remember_graph(self, fingerprint: str, graphs: tuple[Graph, ...]) -> None:
        if len(self.later) == PLANNED_GRAPHS and fingerprint not in self.later:
            logger.info("more than %d graphs: the oldest is planned again if it comes back", PLANNED_GRAPHS)
        self.later[fingerprint] = graphs

    def plan_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, cause: str) -> None:
        alone = step_of_call(args, kwargs, self._context)
        own = [graph for graph in alone.graphs if graph.in_model]
        if all(self._known(graph.fingerprint) for graph in own):
            return
        path_bytes = max((self._longer_by(path, own) for path in self._paths), default=0)
        self._context = replace(self._context, beside=replace(self._context.beside, path_bytes=path_bytes))
        self._growth = times = growth(alone, like=None, reserve=self._context.reserve)
        like = self.steps.get(structures(own), ())
        found = self._fitting(
            lambda beside: self._plan(beside.added_to(alone, times), like, larger=self._is_larger())
        )
        self._log(found.peak_bytes, cause, compiled=False)
        self._remember(found.graphs[: len(own)])

    @property
    def _planned_graph(self) -> Graph | None:
        """The graph of the reserve, where the plan has one graph."""
        return self.first[0] if len(self.first) == 1 else None

    def _as_one_graph(self, segment: Segment, like: Graph | None, cause: str) -> Graph | None:
        """Schedule a step of this graph alone, whose loss reads the outputs that it reads in another such
        step; None where no other step has as many outputs."""
        single = [graphs[0] for graphs in self.steps.values() if len(graphs) == 1]
        likely = [like] if like is not None else single
        found = [fitting for graph in likely if (fitting := as_in(graph, segment)) is not None]
        if not found:
            return None
        changed = identify_model(self._context.model) != self.identity
        optimizer = optimizer_of(self._context.model, self._context.loop) if changed else None
        planned = self._planned_graph
        alone = step_of(segment, self._context, like=found[0], planned=planned, optimizer=optimizer)
        new = alone.graphs[0]
        alike = [graph for graph in found if (graph.structure, graph.apart) == (new.structure, new.apart)]
        self._growth = times = growth(alone, like=planned, reserve=self._context.reserve)
        plan = self._fitting(
            lambda beside: self._plan(
                beside.added_to(alone, times), alike[:1], larger=self._is_larger(), segment=segment
            )
        )
        self._log(plan.peak_bytes, cause)
        self._remember(plan.graphs)
        return plan.graphs[0]

    def _beside_others(self, segment: Segment, like: Graph | None, so_far: CallSoFar, cause: str) -> Graph:
        """Schedule one of several graphs of a step, beside the bytes that the others keep live."""
        position = so_far.num_graphs
        planned = list(self.steps.values())[-1]
        times = self._times(so_far.batch_bytes)
        like = None if like is None else as_in(like, segment)
        position_alike = like or (planned[position] if position < len(planned) > 1 else None)
        alone = step_of(
            segment,
            replace(self._context, update_bytes=None),
            like=like,
            live_bytes=so_far.saved_bytes + self._other_gradient_bytes(segment),
            later_bytes=ceil(position_alike.later_bytes * times) if position_alike is not None else 0,
            is_whole=False,
        )
        growing = growth(alone, like=None, reserve=self._context.reserve)

        def planned_beside(beside: BesideGraphs) -> StepSchedules:
            step = beside.added_to(alone, growing)
            if position_alike is None and not so_far.is_whole:
                # the following graphs are unknown: leave as many bytes free as possible
                return lowest_schedules(planner_for(step), ())
            return self._plan(step, () if like is None else (like,), larger=False)

        found = self._fitting(planned_beside)
        self._log(found.peak_bytes, cause, compiled=False)
        return found.graphs[0]

    def _is_larger(self) -> bool:
        """Whether the step that is planned now is larger than the planned one: eager's would be, too."""
        return self._growth > 1 or _model_bytes(self._context.model) > self._model_bytes

    def _fitting(self, planned: Callable[[BesideGraphs], StepSchedules]) -> StepSchedules:
        """What is `planned` beside the loop's own tensors; where it does not fit beside tensors that are only
        expected to belong to a step, what is planned without them: the step shows whether they do."""
        beside = self._context.beside
        certain = self._certain(beside)
        if certain == beside:
            return planned(beside)
        try:
            found = planned(beside)
        except BudgetTooSmall:
            found = None
        if found is not None and found.peak_bytes <= self.budget_bytes:
            return found
        self._context = replace(self._context, beside=certain)
        return planned(certain)

    def _other_gradient_bytes(self, segment: Segment) -> int:
        """The bytes of gradients of parameters that a graph does not read, earlier gradients included."""
        own = {origin.tensor for origin in segment.origins}
        others = [p for p in self._context.model.parameters() if p.requires_grad and id(p) not in own]
        return sum(p.nbytes for p in others) * (2 if self._context.reserve.earlier_gradient_bytes else 1)

    def _remember(self, graphs: tuple[Graph, ...]) -> None:
        self.steps[structures(graphs)] = graphs
        if len(self.steps) > PLANNED_GRAPHS:
            del self.steps[next(iter(self.steps))]
        for fingerprint, of_runs in by_fingerprint(graphs).items():
            self._remember_graph(fingerprint, of_runs)

    def _plan(
        self, step: Step, like: Sequence[Graph], *, larger: bool, segment: Segment | None = None
    ) -> StepSchedules:
        """Schedules for `step`: repaired from the graphs `like`, or found by a search. Where none fits and
        the step is not `larger` than the planned one, the lowest. A step of one `segment` must fit as the
        executor runs it."""
        step_planner = planner_for(step)
        if segment is not None and isinstance(self._executor, InductorOps):
            return self._compiled_plan(step_planner, segment, self._executor, larger=larger)
        if self._calls.number > 1:
            return self._calls.plan(step, like, planner=self.plan.planner)
        adapted = (
            step_planner.adapt(schedules_of(step, like), budget_bytes=self.budget_bytes) if like else None
        )
        if adapted is not None and adapted.peak_bytes <= self.budget_bytes:
            return adapted
        try:
            answer = step_planner.solve(budget_bytes=self.budget_bytes, planner=self.plan.planner)
            return StepSchedules(answer.peak_bytes, answer.graphs)
        except BudgetTooSmall:
            if larger:
                raise
        return lowest_schedules(step_planner, like)

    def _compiled_plan(
        self, step_planner: Planner, segment: Segment, executor: InductorOps, *, larger: bool
    ) -> StepSchedules:
        """For a step that is not `larger`, the lowest solution where none fits."""
        search = solve_compiled if larger else nearest_compiled
        answer = search(
            step_planner, segment, executor, budget_bytes=self.budget_bytes, planner=self.plan.planner
        )
        return StepSchedules(answer.peak_bytes, answer.graphs)

    def _log(self, peak_bytes: int, cause: str, *, compiled: bool = True) -> None:
        """`compiled`: where a compiler runs the graph, the peak is that of its code."""
        self._peak_bytes = max(self._peak_bytes, peak_bytes)
        self.spare_bytes = min(self.spare_bytes, self.budget_bytes - peak_bytes)
        if peak_bytes > self.budget_bytes and self._calls.number > 1:
            if not self._told_of_calls:
                logger.warning(
                    CALLS_DO_NOT_FIT,
                    self._calls.number,
                    size_and_bytes(peak_bytes),
                    format_size(self.budget_bytes),
                    peak_bytes,
                )
            self._told_of_calls = True
        elif peak_bytes > self.budget_bytes:
            logger.warning(
                "a new graph (%s) runs with the lowest peak found, at most %s: that it stays within the "
                "budget of %s is not proven%s",
                cause,
                size_and_bytes(peak_bytes),
                size_and_bytes(self.budget_bytes),
                self._unsaid_advice,
            )
            self._unsaid_advice = ""
        else:
            logger.info(
                "a new graph (%s) is planned: %s of %s",
                cause,
                format_size(peak_bytes),
                format_size(self.budget_bytes),
            )
        if not compiled and isinstance(self._executor, InductorOps) and not self._told_of_executor:
            self._told_of_executor = True
            logger.warning(
                "a new graph (%s) is planned as if its ops ran one by one, and its code from Inductor "
                "may keep more bytes live: plan for this shape, or choose executor 'eager'",
                cause,
            )


def _model_bytes(model: nn.Module) -> int:
    """Of parameters and buffers, and of the gradients of parameters that are trained."""
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return sum(tensor.nbytes for tensor in (*parameters, *model.buffers(), *trained))
