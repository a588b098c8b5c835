"""Plan graphs that come after a plan was applied: other batch shapes, other settings."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil, inf
from typing import Any

from torch import nn

from lowtide.errors import BudgetTooSmall
from lowtide.facts import Graph, Step
from lowtide.optim.shadow_optimizer import num_states, state_bytes
from lowtide.optim.split_check import update_bytes_of
from lowtide.optim.step_in_backward import StepInBackward
from lowtide.planning.planner import Planner, StepSchedules
from lowtide.planning.repeated_graphs import REPEATED_GRAPH_PLANNERS, planner_for
from lowtide.plans import Plan
from lowtide.runtime.backend import GraphSchedule
from lowtide.runtime.call_schedules import CallSoFar, Schedules
from lowtide.runtime.executor import (
    EAGER_OPS,
    Executor,
    InductorOps,
    RecentlyUsed,
    nearest_compiled,
    solve_compiled,
)
from lowtide.runtime.incomplete_steps import (
    StepContext,
    as_in,
    growth,
    leaves_for_loss,
    lowest_schedules,
    optimizer_of,
    peak_with_outputs,
    schedules_of,
    step_of,
    step_of_call,
)
from lowtide.runtime.loop_watch import LiveLoss
from lowtide.runtime.pending_calls import CallsPlanner
from lowtide.torch_compat.ddp import Buckets
from lowtide.torch_compat.dynamo import StartOver
from lowtide.torch_compat.fsdp2 import units_of
from lowtide.trace.identity import identify_model, why_unknown
from lowtide.trace.model_call import Loop
from lowtide.trace.segments import Segment
from lowtide.trace.step_device import device_of
from lowtide.units import format_size, size_and_bytes

logger = logging.getLogger("lowtide")

SCALAR_BYTES = 8
UNCOUNTED_BYTES = 4096
"""A few numbers around the loss; no plan counts them."""

PLANNED_GRAPHS = 1024
"""Schedules of later graphs that are kept; an older graph is planned again."""


CALLS_DO_NOT_FIT = (
    "the %d calls of the model before a backward pass take up to %s together, by the lowest plan that was "
    "found, and the budget is %s: the peak can be higher than the budget. Call the model with smaller "
    "batches, run backward() after each call, or plan for a budget of %d bytes"
)


class Replanner(Schedules):
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
        self.first = tuple(graph for graph in plan.solution.graphs if graph.in_model)
        """the graphs of the user's own plan"""
        super().__init__(self.first, plan.solution.gradient_strides)
        self.plan = plan
        self.budget_bytes = plan.budget_bytes
        self._executor = executor
        offload = plan.solution.offload
        self._context = StepContext(
            model=model,
            reserve=plan.solution.reserve,
            known=plan.known,
            loop=plan.loop or Loop(holds_outputs=plan.solution.holds_outputs),
            update_bytes=None
            if updates is None
            else update_bytes_of(updates.optimizers, within_parameters=updates.within_parameters),
            transfer_speed=None if offload is None else offload.transfer_speed,
            orders=self.orders,
        )
        self.identity = identify_model(model)
        self.steps = {_structures(self.first): self.first}
        """by structure, the graphs of the last planned step"""
        self.later: RecentlyUsed[str, Graph] = RecentlyUsed(PLANNED_GRAPHS)
        self._alike: RecentlyUsed[str, Graph] = RecentlyUsed(PLANNED_GRAPHS)
        self._dropped: RecentlyUsed[str, str] = RecentlyUsed(PLANNED_GRAPHS)
        self._peak_bytes = plan.peak_bytes
        self._told_of_executor = self._told_of_calls = False
        self._num_states = 0
        self._growth = Fraction(1)
        self.spare_bytes: int = plan.budget_bytes - plan.peak_bytes
        self.earlier_gradient_bytes = plan.solution.reserve.earlier_gradient_bytes
        is_compiled = isinstance(executor, InductorOps)
        self._is_sharded = bool(units_of(model))
        self._calls = CallsPlanner(plan.budget_bytes)
        self._has_other_calls = False
        are_alike = plan.planner in REPEATED_GRAPH_PLANNERS and updates is None and offload is None
        if are_alike and not is_compiled and not self._is_sharded:
            self.num_calls = 1
        has_reserve = self.loss_is_unknown and not is_compiled and not self._is_sharded
        self._loss_reserve = plan.loss_reserve if has_reserve else None
        if self._loss_reserve is not None:
            self.graphs = _by_fingerprint(self._loss_reserve.graphs)
            self._peak_bytes = self.budget_bytes  # at most, with the bytes that are reserved
            self._reserve(loss_bytes=max(self._context.reserve.loss_bytes, self._loss_reserve.loss_bytes))

    def schedule_of(self, segment: Segment, so_far: CallSoFar) -> GraphSchedule:
        kind = segment.structure
        graph = self._known(segment.fingerprint)
        if graph is None:
            cause = self._dropped.get(segment.fingerprint) or why_unknown(segment, self.first)
            like = self._alike.get(kind)
            if so_far.nothing_ran and so_far.is_whole:
                graph = self._as_one_graph(segment, like, cause)
            if graph is None and so_far.nothing_ran:
                raise StartOver(cause)
            if graph is None:
                graph = self._beside_others(segment, like, so_far, cause)
            self._remember_graph(segment.fingerprint, graph)
        self._alike[kind] = graph
        return GraphSchedule.of(graph)

    def _known(self, fingerprint: str) -> Graph | None:
        # the last solution counts: the other graphs of that step were planned with this schedule
        graph: Graph | None = self.later.get(fingerprint) or self.graphs.get(fingerprint)
        return graph

    def _remember_graph(self, fingerprint: str, graph: Graph) -> None:
        if len(self.later) == PLANNED_GRAPHS and fingerprint not in self.later:
            logger.info("more than %d graphs: the oldest is planned again if it comes back", PLANNED_GRAPHS)
        self.later[fingerprint] = graph

    @property
    def counts_loop(self) -> bool:
        # FSDP2 gathers parameters before the first graph's backward pass: bytes that look like the loop's own
        return self._context.loop.loss is None or not self._is_sharded

    @property
    def loss_is_unknown(self) -> bool:
        outside = any(graph.tangent_bytes > SCALAR_BYTES for graph in self.first[-1:])
        return self._context.loop.loss is None and outside

    def learn(self, loss: LiveLoss | None, used: Mapping[str, Collection[int]]) -> bool:
        reserved, self._loss_reserve = self._loss_reserve, None
        if reserved and loss and not used and leaves_for_loss(self.plan, loss.peak_bytes):
            self.graphs = _by_fingerprint(self.first)
            self.later.clear()
            self._reserve(loss_bytes=max(self.plan.solution.reserve.loss_bytes, loss.peak_bytes))
            self._peak_bytes = self.plan.peak_bytes
            self._alike.clear()
            logger.info("the loop's loss needs %s: the plan is as it was made", format_size(loss.peak_bytes))
            return True
        causes = []
        more_bytes = self._not_counted(loss) if loss is not None else 0
        if loss is not None and more_bytes:
            self.spare_bytes -= more_bytes
            if self._peak_bytes + more_bytes > self.budget_bytes:
                causes.append(
                    f"the loop made {size_and_bytes(loss.peak_bytes)} between the forward and the backward "
                    f"pass, {size_and_bytes(more_bytes)} more than the plan counts"
                    + ("" if self._context.loop.loss is None else " by the given `loss=`")
                )
            # the bytes of the loss grow with the batch from the planned one on
            times = self._times(loss.batch_bytes)
            self._reserve(
                loss_bytes=ceil(loss.peak_bytes / times), loss_kept_bytes=ceil(loss.kept_bytes / times)
            )
        for fingerprint, outputs in used.items():
            causes.append(
                f"the loss reads output {min(outputs)} of the model, for which the plan counts on no gradient"
            )
            self._use(fingerprint, outputs)
        if not causes:
            return False
        cause = "; ".join(causes)
        logger.warning("%s: graphs are planned again. %s", cause, self._advice_for_loss(more_bytes))
        self._drop(cause)
        return True

    def _advice_for_loss(self, more_bytes: int) -> str:
        if not self.in_trainer:
            return "Pass `loss=` the function that your loop uses, to have it counted from the start"
        first = f": give Lowtide a reserve={more_bytes} for the first step, if that matters"
        return f"The trainer's loss is counted from now on{first if more_bytes else ''}"

    def _reserve(self, **amounts: Any) -> None:
        """Count other bytes besides the graphs from now on."""
        self._context = replace(self._context, reserve=replace(self._context.reserve, **amounts))

    def _drop(self, cause: str) -> None:
        self._loss_reserve = None
        for fingerprint in (*self.graphs, *self.later):
            self._dropped[fingerprint] = cause
        self.graphs.clear()
        self.later.clear()
        self._alike.clear()

    def count_state(self) -> bool:
        alive = [each for reference in self._context.loop.references if (each := reference()) is not None]
        number = sum(map(num_states, alive))
        if number == self._num_states:
            return False
        self._num_states = number
        device = device_of(self._context.model, ())
        nbytes = sum(state_bytes(optimizer, device) for optimizer in alive)
        more_bytes = nbytes - self._context.reserve.optimizer_state_bytes
        if more_bytes <= UNCOUNTED_BYTES:
            return False
        self._reserve(optimizer_state_bytes=nbytes)
        return self._outgrown(
            more_bytes,
            f"the optimizer's state takes {size_and_bytes(more_bytes)} more than the plan counts",
            "Not every step trains all parameters of the model: plan for a budget that is smaller by "
            f"{more_bytes} bytes to have all of the state counted from the start",
        )

    def expect_calls(self, number: int, between_bytes: int) -> bool:
        if self.num_calls is None or max(number, self.num_calls) == 1:
            return False
        has_more = between_bytes > self._calls.between_bytes + UNCOUNTED_BYTES
        if number <= self.num_calls and not self._has_other_calls and not has_more:
            return False
        self._has_other_calls = False
        self.num_calls = max(number, self.num_calls)
        self._calls.expect(self.num_calls, between_bytes)
        self._drop(f"a step calls the model {self.num_calls} times before its backward pass")
        return True

    def begin_call(self, position: int, live_bytes: int) -> None:
        self._calls.begin(position, live_bytes)

    def excess_bytes(self, fingerprints: Iterable[str]) -> int:
        nbytes = self._calls.excess_bytes(fingerprints)
        self._has_other_calls = self._has_other_calls or nbytes > 0
        return nbytes

    def _outgrown(self, more_bytes: int, cause: str, advice: str) -> bool:
        """Whether schedules are dropped, since `more_bytes` that stay live all along exceed the budget."""
        self._peak_bytes += more_bytes
        self.spare_bytes -= more_bytes
        if self._peak_bytes <= self.budget_bytes:
            return False
        logger.warning("%s: graphs are planned again. %s", cause, advice)
        self._peak_bytes = 0
        self._drop(cause)
        return True

    @property
    def last_output_bytes(self) -> int:
        return self._context.reserve.last_output_bytes

    def count_outputs(self, nbytes: int) -> bool:
        more_bytes = nbytes - self.last_output_bytes
        if more_bytes <= UNCOUNTED_BYTES or not self._context.loop.holds_outputs:
            return False
        self._reserve(last_output_bytes=nbytes)
        if not self.later and peak_with_outputs(self.plan, nbytes, self.graphs) <= self.budget_bytes:
            return False
        return self._outgrown(
            more_bytes,
            f"the loop keeps {size_and_bytes(nbytes)} of earlier outputs live through the forward pass, "
            f"{size_and_bytes(more_bytes)} more than the plan counts",
            "Free outputs after their last use (`del`)",
        )

    @property
    def pays_for_outputs(self) -> bool:
        nbytes = self.last_output_bytes
        if not nbytes or 100 * nbytes < self.budget_bytes or not self.plan.recompute_seconds:
            return False
        with_more = peak_with_outputs(self.plan, nbytes + UNCOUNTED_BYTES, _by_fingerprint(self.first))
        return self.plan.peak_bytes < with_more < inf

    def count_buckets(self, buckets: Buckets) -> bool:
        counted = self._context.reserve
        more_bytes = buckets.nbytes - counted.bucket_bytes
        if counted.gradients_in_buckets and not buckets.hold_gradients:
            more_bytes += buckets.nbytes
        if more_bytes <= 0:
            return False
        self._reserve(bucket_bytes=buckets.nbytes, gradients_in_buckets=buckets.hold_gradients)
        return self._outgrown(
            more_bytes,
            f"DistributedDataParallel's buckets of gradients take {size_and_bytes(more_bytes)} more than the "
            "plan counts",
            "Plan the wrapped model to count buckets from the start",
        )

    def _not_counted(self, loss: LiveLoss) -> int:
        """The bytes of the loop's loss beyond the reserve of the plan."""
        more_bytes = loss.peak_bytes - ceil(self._context.reserve.loss_bytes * self._times(loss.batch_bytes))
        return more_bytes if more_bytes > UNCOUNTED_BYTES else 0

    def _times(self, batch_bytes: int) -> Fraction:
        """The factor from the planned call to a larger one, at least that of the graphs planned last; 1 for a
        smaller call."""
        return max(self._growth, Fraction(batch_bytes, max(1, self._context.reserve.batch_bytes)))

    def _use(self, fingerprint: str, outputs: Collection[int]) -> None:
        """Expect a gradient for these outputs of a graph."""

        def with_gradients(graph: Graph) -> Graph:
            if graph.fingerprint != fingerprint:
                return graph
            # the known bytes of tangents are no longer valid for this graph
            return replace(
                graph, missing=tuple(o for o in graph.missing if o not in outputs), tangent_bytes=0
            )

        self.first = tuple(map(with_gradients, self.first))
        self.steps = {kind: tuple(map(with_gradients, graphs)) for kind, graphs in self.steps.items()}

    def plan_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, cause: str) -> None:
        step = step_of_call(args, kwargs, self._context)
        own = [graph for graph in step.graphs if graph.in_model]
        if all(self._known(graph.fingerprint) for graph in own):
            return
        self._growth = growth(step, like=None, reserve=self._context.reserve)
        larger = self._growth > 1 or identify_model(self._context.model) != self.identity
        found = self._plan(step, self.steps.get(_structures(own), ()), larger=larger)
        self._log(found.peak_bytes, cause, compiled=False)
        self._remember(found.graphs[: len(own)])

    @property
    def _planned_graph(self) -> Graph | None:
        """The graph of the reserve, where the plan has one graph."""
        return self.first[0] if len(self.first) == 1 else None

    def _as_one_graph(self, segment: Segment, like: Graph | None, cause: str) -> Graph | None:
        """Schedule a step of this graph alone, whose loss reads the outputs that it reads in another such
        step; None where no other step has as many outputs."""
        alone = [graphs[0] for graphs in self.steps.values() if len(graphs) == 1]
        likely = [like] if like is not None else alone
        found = [fitting for graph in likely if (fitting := as_in(graph, segment)) is not None]
        if not found:
            return None
        changed = identify_model(self._context.model) != self.identity
        optimizer = optimizer_of(self._context.model, self._context.loop) if changed else None
        step = step_of(
            segment, self._context, like=found[0], planned=self._planned_graph, optimizer=optimizer
        )
        new = step.graphs[0]
        alike = [graph for graph in found if (graph.structure, graph.apart) == (new.structure, new.apart)]
        self._growth = growth(step, like=self._planned_graph, reserve=self._context.reserve)
        larger = changed or self._growth > 1
        plan = self._plan(step, alike[:1], larger=larger, segment=segment)
        self._log(plan.peak_bytes, cause)
        self._remember(plan.graphs)
        return plan.graphs[0]

    def _beside_others(self, segment: Segment, like: Graph | None, so_far: CallSoFar, cause: str) -> Graph:
        """Schedule one of several graphs of a step, beside the bytes that the others keep live."""
        position = so_far.num_graphs
        planned = list(self.steps.values())[-1]
        times = self._times(so_far.batch_bytes)
        like = None if like is None else as_in(like, segment)
        beside = like or (planned[position] if position < len(planned) > 1 else None)
        step = step_of(
            segment,
            replace(self._context, update_bytes=None),
            like=like,
            live_bytes=so_far.saved_bytes + self._other_gradient_bytes(segment),
            later_bytes=ceil(beside.later_bytes * times) if beside is not None else 0,
            is_whole=False,
        )
        if beside is None and not so_far.is_whole:
            # the following graphs are unknown: leave as many bytes free as possible
            found = lowest_schedules(planner_for(step), ())
        else:
            found = self._plan(step, () if like is None else (like,), larger=False)
        self._log(found.peak_bytes, cause, compiled=False)
        return found.graphs[0]

    def _other_gradient_bytes(self, segment: Segment) -> int:
        """The bytes of gradients of parameters that a graph does not read, earlier gradients included."""
        own = {origin.tensor for origin in segment.origins}
        others = [p for p in self._context.model.parameters() if p.requires_grad and id(p) not in own]
        return sum(p.nbytes for p in others) * (2 if self._context.reserve.earlier_gradient_bytes else 1)

    def _remember(self, graphs: tuple[Graph, ...]) -> None:
        self.steps[_structures(graphs)] = graphs
        if len(self.steps) > PLANNED_GRAPHS:
            del self.steps[next(iter(self.steps))]
        for graph in graphs:
            self._remember_graph(graph.fingerprint, graph)

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
                "budget of %s is not proven",
                cause,
                size_and_bytes(peak_bytes),
                size_and_bytes(self.budget_bytes),
            )
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


def _by_fingerprint(graphs: Sequence[Graph]) -> dict[str, Graph]:
    return {graph.fingerprint: graph for graph in graphs}


def _structures(graphs: Sequence[Graph]) -> tuple[str, ...]:
    return tuple(graph.structure for graph in graphs)
