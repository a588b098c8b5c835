"""Count what the user's loop needs beside a plan's graphs, and drop schedules where that outgrows the budget.

That is its loss, earlier outputs, the state of its optimizer, buckets of gradients, further calls of a step.
"""

import logging
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil, inf
from typing import Any

import torch
from torch import nn

from lowtide.facts import Graph
from lowtide.optim.shadow_optimizer import num_states, state_bytes
from lowtide.optim.split_check import update_bytes_of
from lowtide.optim.step_in_backward import StepInBackward
from lowtide.plans import Plan
from lowtide.runtime.call_schedules import Schedules, by_fingerprint
from lowtide.runtime.executor import Executor, InductorOps, RecentlyUsed
from lowtide.runtime.incomplete_steps import StepContext
from lowtide.runtime.loop_reserve import leaves, peak_beside
from lowtide.runtime.loop_watch import LiveLoss
from lowtide.runtime.pending_calls import CallsPlanner
from lowtide.torch_compat.autograd_engine import version_of
from lowtide.torch_compat.ddp import Buckets
from lowtide.torch_compat.fsdp2 import units_of
from lowtide.torch_compat.python_tensors import python_optimizers
from lowtide.trace.model_call import Loop
from lowtide.trace.step_device import device_of
from lowtide.units import format_size, size_and_bytes

logger = logging.getLogger("lowtide")

OptimizerRefs = Sequence[weakref.ref[torch.optim.Optimizer]]

SCALAR_BYTES = 8
UNCOUNTED_BYTES = 4096
"""A few numbers around the loss; no plan counts them."""

PLANNED_GRAPHS = 1024
"""Schedules of later graphs that are kept; an older graph is planned again."""


def _alive(references: OptimizerRefs) -> list[torch.optim.Optimizer]:
    return [each for reference in references if (each := reference()) is not None]


class CountedLoop(Schedules):
    """The schedules of a plan's graphs, as long as what is counted of the loop around them fits."""

    def __init__(
        self, plan: Plan, model: nn.Module, *, updates: StepInBackward | None, executor: Executor
    ) -> None:
        self.first = tuple(graph for graph in plan.solution.graphs if graph.in_model)
        """the graphs of the user's own plan"""
        super().__init__(self.first, plan.solution.gradient_strides)
        self.plan = plan
        self.in_pipeline = plan.solution.pipeline
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
            offload_what=() if offload is None else offload.what,
            resting=plan.solution.resting,
            rounds=plan.solution.rounds,
            orders=self.orders,
            calls=plan.solution.calls,
        )
        self.steps = {structures(self.first): self.first}
        """by structure, the graphs of the last planned step"""
        self.later: RecentlyUsed[str, tuple[Graph, ...]] = RecentlyUsed(PLANNED_GRAPHS)
        self._alike: RecentlyUsed[str, Graph] = RecentlyUsed(PLANNED_GRAPHS)
        self._dropped: RecentlyUsed[str, str] = RecentlyUsed(PLANNED_GRAPHS)
        self._structures: RecentlyUsed[str, str] = RecentlyUsed(PLANNED_GRAPHS)
        """of graphs as they are traced, by fingerprint"""
        self._peak_bytes = plan.peak_bytes
        self._num_states = 0
        self._parameter_version: int | None = None
        self._other_optimizers: OptimizerRefs | None = None
        self._unsaid_advice = ""
        """for the case that no schedule fits any more"""
        self._growth = Fraction(1)
        self.spare_bytes: int = plan.budget_bytes - plan.peak_bytes
        self.earlier_gradient_bytes = plan.solution.reserve.earlier_gradient_bytes
        is_compiled = isinstance(executor, InductorOps)
        self._is_sharded = bool(units_of(model))
        self._calls = CallsPlanner(plan.budget_bytes)
        self._has_other_calls = False
        are_alike = updates is None and offload is None
        if are_alike and not is_compiled and not self._is_sharded:
            self.num_calls = plan.solution.calls
            self._calls.expect(self.num_calls, between_bytes=0)
        has_reserve = self.loss_is_unknown and not is_compiled and not self._is_sharded
        self._loss_reserve = plan.loss_reserve if has_reserve else None
        if self._loss_reserve is not None:
            self.graphs = by_fingerprint(self._loss_reserve.graphs)
            self._peak_bytes = self.budget_bytes  # at most, with the bytes that are reserved
            self._reserve(loss_bytes=max(self._context.reserve.loss_bytes, self._loss_reserve.loss_bytes))

    @property
    def counts_loop(self) -> bool:
        # FSDP2 gathers parameters before the first graph's backward pass, and a pipeline receives values:
        # bytes that look like the loop's own
        is_known = self._context.loop.loss is not None and self._is_sharded
        return not is_known and not self.in_pipeline

    @property
    def loss_is_unknown(self) -> bool:
        outside = any(graph.tangent_bytes > SCALAR_BYTES for graph in self.first[-1:])
        return self._context.loop.loss is None and outside and not self.in_pipeline

    def learn(self, loss: LiveLoss | None, used: Mapping[str, Collection[int]]) -> bool:
        reserved, self._loss_reserve = self._loss_reserve, None
        if reserved and loss and not used and self._leaves(loss.peak_bytes, loss.kept_bytes):
            self.graphs = by_fingerprint(self.first)
            self.later.clear()
            own = self.plan.solution.reserve
            self._reserve(
                loss_bytes=max(own.loss_bytes, loss.peak_bytes),
                loss_kept_bytes=max(own.loss_kept_bytes, loss.kept_bytes),
            )
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

    def _leaves(self, loss_bytes: int, loss_kept_bytes: int) -> bool:
        """Whether the plan fits beside such a loss and what else the loop keeps."""
        return leaves(self.plan, loss_bytes, self._context.beside, loss_kept_bytes=loss_kept_bytes)

    def _advice_for_loss(self, more_bytes: int) -> str:
        owner = self.loop_owner
        if owner is None:
            return "Pass `loss=` the function that your loop uses, to have it counted from the start"
        first = f": {owner.first_step(more_bytes)}" if more_bytes else ""
        return f"The {owner.name}'s loss is counted from now on{first}"

    def _not_counted(self, loss: LiveLoss) -> int:
        """The bytes of the loop's loss beyond the reserve of the plan."""
        counted, times = self._context.reserve, self._times(loss.batch_bytes)
        more_bytes = max(
            loss.peak_bytes - ceil(counted.loss_bytes * times),
            loss.kept_bytes - ceil(counted.loss_kept_bytes * times),
        )
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

        kind = self._structures.get(fingerprint)
        if kind is not None:
            read = self._context.read_outputs
            known = read.get(kind, frozenset())
            self._context = replace(self._context, read_outputs={**read, kind: known.union(outputs)})
        self.first = tuple(map(with_gradients, self.first))
        self.steps = {kind: tuple(map(with_gradients, graphs)) for kind, graphs in self.steps.items()}

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

    def _outgrown(self, more_bytes: int, cause: str, advice: str, *, is_over: bool = True) -> bool:
        """Whether schedules are dropped, since `more_bytes` that stay live all along exceed the budget.
        `is_over`: a step may have exceeded it already."""
        self._peak_bytes += more_bytes
        self.spare_bytes -= more_bytes
        if self._peak_bytes <= self.budget_bytes:
            return False
        level = logging.WARNING if is_over else logging.INFO
        logger.log(level, "%s: graphs are planned again. %s", cause, advice)
        self._unsaid_advice = "" if is_over else f". {advice}"
        self._peak_bytes = 0
        self._drop(cause)
        return True

    def count_state(self) -> bool:
        planned = _alive(self._context.loop.references)
        every = [*planned, *_alive(self._find_other_optimizers(planned))]
        number = sum(map(num_states, every))
        if number == self._num_states:
            return False
        self._num_states = number
        device = device_of(self._context.model, ())
        nbytes = state_bytes(every, device)
        more_bytes = nbytes - self._context.reserve.optimizer_state_bytes
        if more_bytes <= UNCOUNTED_BYTES:
            return False
        self._reserve(optimizer_state_bytes=nbytes)
        return self._outgrown(
            more_bytes,
            f"the optimizer's state takes {size_and_bytes(more_bytes)} more than the plan counts",
            "Plan with optimizer= the one that trains the model, to have its state counted from the start"
            if nbytes > state_bytes(planned, device)  # not where a trainer wraps the planned optimizer
            else "Not every step trains all parameters of the model: plan for a budget that is smaller by "
            f"{more_bytes} bytes to have all of the state counted from the start",
        )

    def _find_other_optimizers(self, planned: Sequence[torch.optim.Optimizer]) -> OptimizerRefs:
        """Those that have parameters of the model and are not `planned`. They are looked for once, at the
        first call after parameters have changed."""
        if self._other_optimizers is not None:
            return self._other_optimizers
        trained = next((p for p in self._context.model.parameters() if p.requires_grad), None)
        version = 0 if trained is None else version_of(trained)
        before, self._parameter_version = self._parameter_version, version
        if before is None or before == version:
            return ()
        own = {id(parameter) for parameter in self._context.model.parameters()}
        self._other_optimizers = [
            weakref.ref(optimizer)
            for optimizer in python_optimizers()
            if all(optimizer is not each for each in planned)
            and any(id(p) in own for group in optimizer.param_groups for p in group["params"])
        ]
        return self._other_optimizers

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

    @property
    def last_output_bytes(self) -> int:
        return self._context.reserve.last_output_bytes

    def count_outputs(self, nbytes: int) -> bool:
        more_bytes = nbytes - self.last_output_bytes
        if more_bytes <= UNCOUNTED_BYTES or not self._context.loop.holds_outputs:
            return False
        self._reserve(last_output_bytes=nbytes)
        peak_bytes = inf if self.later else peak_beside(self.plan, self.graphs, last_output_bytes=nbytes)
        if peak_bytes <= self.budget_bytes:
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
        own, more_bytes = by_fingerprint(self.first), nbytes + UNCOUNTED_BYTES
        with_more = peak_beside(self.plan, own, last_output_bytes=more_bytes)
        return self.plan.peak_bytes < with_more < inf

    def expect_calls(self, number: int, between_bytes: int) -> bool:
        if self.num_calls is None or max(number, self.num_calls) == 1:
            return False
        # a given loss is part of each call
        counted_bytes = 0 if self._context.loop.loss is None else self._context.reserve.loss_bytes
        between_bytes = max(0, between_bytes - counted_bytes)
        has_more = between_bytes > self._calls.between_bytes + UNCOUNTED_BYTES
        if number <= self.num_calls and not self._has_other_calls and not has_more:
            return False
        self._has_other_calls = False
        self.num_calls = max(number, self.num_calls)
        self._context = replace(self._context, calls=self.num_calls)
        self._calls.expect(self.num_calls, between_bytes)
        self._drop(f"a step calls the model {self.num_calls} times before its backward pass")
        return True

    def begin_call(self, position: int, live_bytes: int) -> None:
        self._calls.begin(position, live_bytes)

    def excess_bytes(self, fingerprints: Iterable[str]) -> int:
        nbytes = self._calls.excess_bytes(fingerprints)
        self._has_other_calls = self._has_other_calls or nbytes > 0
        return nbytes


def structures(graphs: Sequence[Graph]) -> tuple[str, ...]:
    return tuple(graph.structure for graph in graphs)
