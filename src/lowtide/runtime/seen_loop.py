"""Choose schedules that leave room for what is seen of the user's loop when a call of the model begins.

That is tensors of its own, gradients of earlier passes, and longer paths through a model whose values decide
which graphs run.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from torch import nn

from lowtide.facts import Graph
from lowtide.optim.step_in_backward import StepInBackward
from lowtide.plans import Plan
from lowtide.runtime.call_schedules import by_fingerprint
from lowtide.runtime.counted_loop import PLANNED_GRAPHS, UNCOUNTED_BYTES, CountedLoop
from lowtide.runtime.executor import Executor, InductorOps, RecentlyUsed
from lowtide.runtime.incomplete_steps import NOTHING_BESIDE, BesideGraphs
from lowtide.runtime.loop_reserve import graphs_beside, peak_beside
from lowtide.runtime.loop_tensors import LoopBytes
from lowtide.units import format_size, size_and_bytes

logger = logging.getLogger("lowtide")

OWN_TENSORS_ADVICE = (
    "Give `loss=` with its labels, call zero_grad() before the forward pass, or plan with accumulate=True, "
    "to have them counted from the start"
)


Path = tuple[tuple[str, int], ...]
"""How often a call has run each graph."""


class Unfitted(NamedTuple):
    """Bytes that were counted and not planned for yet; `is_over`: a step may have exceeded the budget."""

    nbytes: int = 0
    is_over: bool = False


class SeenLoop(CountedLoop):
    """Schedules that leave room for what was seen of the loop."""

    def __init__(
        self, plan: Plan, model: nn.Module, *, updates: StepInBackward | None, executor: Executor
    ) -> None:
        super().__init__(plan, model, updates=updates, executor=executor)
        self._not_fitted = Unfitted()
        self._is_expected, self._expected_too_much = True, False
        self._paths: RecentlyUsed[Path, bool] = RecentlyUsed(PLANNED_GRAPHS)
        self._saved_bytes: dict[str, int] = {}
        """for the backward pass, by graph"""
        self.counts_gradients = updates is None and not self._is_sharded

    def see_loop(self, found: LoopBytes) -> None:
        # other processes would not plan again in the same step; a pipeline's tensors are counted
        if self._is_sharded or self.in_pipeline:
            return
        counted = self._context.beside
        times = self._times(found.batch_bytes)
        # the inputs of a given loss are counted with it
        inputs = self.plan.solution.reserve.loss_input_bytes - self._context.loop.reserve_bytes
        seen = replace(
            counted,
            step_bytes=max(0, ceil(found.step_bytes / times) - max(0, inputs)),
            forward_bytes=ceil(found.forward_bytes / times),
        )
        if not self._is_expected:
            seen = replace(
                seen,
                step_bytes=max(seen.step_bytes, counted.step_bytes),
                forward_bytes=max(seen.forward_bytes, counted.forward_bytes),
            )
        self._is_expected = not found.is_seen
        more_bytes = seen.nbytes - counted.nbytes
        self._expected_too_much = more_bytes < -UNCOUNTED_BYTES
        # a loss and gradients are seen before they can exceed the budget
        self._count_beside(seen, more_bytes, is_over=found.is_seen and seen.step_bytes > counted.step_bytes)

    def see_gradients(self, nbytes: int, *, to_the_end: bool, is_seen: bool) -> None:
        beside, reserve = self._context.beside, self._context.reserve
        more_bytes = nbytes - reserve.earlier_gradient_bytes - beside.gradient_bytes
        if to_the_end and nbytes > reserve.earlier_gradient_bytes:
            self.earlier_gradient_bytes = nbytes
            self._reserve(earlier_gradient_bytes=nbytes)
            beside, more_bytes = replace(beside, gradient_bytes=0), nbytes
        elif more_bytes > 0:
            beside = replace(beside, gradient_bytes=nbytes)
        self._count_beside(beside, more_bytes, is_over=is_seen)

    def see_path(self, fingerprints: Sequence[str], saved_bytes: Sequence[int]) -> int:
        path = tuple(sorted(Counter(fingerprints).items()))
        if len(fingerprints) < 2 or self._is_sharded or path in self._paths:
            return 0
        self._paths[path] = True
        for fingerprint, nbytes in zip(fingerprints, saved_bytes, strict=True):
            self._saved_bytes[fingerprint] = max(nbytes, self._saved_bytes.get(fingerprint, 0))
        nbytes = min(self._longer_by(path, graphs) for graphs in self.steps.values())
        beside = self._context.beside
        more_bytes = nbytes - beside.path_bytes
        if more_bytes <= UNCOUNTED_BYTES:
            return 0
        self._count_beside(replace(beside, path_bytes=nbytes), more_bytes, is_over=False)
        return more_bytes

    def _longer_by(self, path: Path, graphs: Sequence[Graph]) -> int:
        """The bytes that a path through the model saves besides those of a planned step."""
        planned = Counter(graph.fingerprint for graph in graphs)
        run = dict(path)
        more = (run.get(one, 0) - planned[one] for one in {**run, **planned})
        saved = (self._saved_bytes.get(one, 0) for one in {**run, **planned})
        return max(0, sum(number * nbytes for number, nbytes in zip(more, saved, strict=True)))

    def _certain(self, beside: BesideGraphs) -> BesideGraphs:
        """`beside` without tensors that are only expected to belong to a step: a data set, say, that was new
        when the first step began."""
        return replace(beside, step_bytes=0, forward_bytes=0) if self._is_expected else beside

    def _count_beside(self, seen: BesideGraphs, more_bytes: int, *, is_over: bool) -> None:
        self._context = replace(self._context, beside=seen)
        if more_bytes > UNCOUNTED_BYTES:
            before = self._not_fitted
            self._not_fitted = Unfitted(before.nbytes + more_bytes, before.is_over or is_over)

    def fit_beside_loop(self) -> bool:
        unfitted, self._not_fitted = self._not_fitted, Unfitted()
        is_tight, self._expected_too_much = self._expected_too_much, False
        own, reserve = by_fingerprint(self.first), self._context.reserve
        may_relax = is_tight and not unfitted.nbytes and self.graphs not in ({}, own) and not self.later
        if may_relax and self._leaves(reserve.loss_bytes, reserve.loss_kept_bytes):
            self.graphs = own  # a data set, say, that was new when the first step began
            return True
        if not unfitted.nbytes or not (self.graphs or self.later):
            return False  # or dropped already, and planned with these bytes
        beside, counted = self._context.beside, self.plan.solution.reserve
        is_as_planned = not self.later and not isinstance(self._executor, InductorOps)
        if is_as_planned and reserve.earlier_gradient_bytes == counted.earlier_gradient_bytes:
            outputs = reserve.last_output_bytes
            peak_bytes = peak_beside(
                self.plan,
                self.graphs,
                loss_bytes=reserve.loss_bytes,
                loss_kept_bytes=reserve.loss_kept_bytes,
                last_output_bytes=outputs if outputs > counted.last_output_bytes else None,
                beside=beside,
            )
            if peak_bytes <= self.budget_bytes:
                self.spare_bytes = min(self.spare_bytes, self.budget_bytes - int(peak_bytes))
                return False
            graphs = graphs_beside(
                self.plan,
                loss_bytes=reserve.loss_bytes,
                loss_kept_bytes=reserve.loss_kept_bytes,
                beside=beside,
            )
            if graphs is not None and not unfitted.is_over:
                self.graphs, self._peak_bytes = by_fingerprint(graphs), self.budget_bytes
                logger.info("the loop's own tensors take %s: other schedules", format_size(unfitted.nbytes))
                return True
            is_seen = beside.gradient_bytes or beside.path_bytes or not self._is_expected
            if graphs is None and not is_seen:
                # the first step shows whether they belong to a step
                self._context = replace(self._context, beside=NOTHING_BESIDE)
                return False
        return self._outgrown(
            unfitted.nbytes,
            f"the loop keeps {size_and_bytes(unfitted.nbytes)} of its own tensors live (labels, gradients, "
            "the last loss), which the plan did not count",
            self._advice_for_own_tensors(unfitted.nbytes),
            is_over=unfitted.is_over,
        )

    def _advice_for_own_tensors(self, nbytes: int) -> str:
        owner = self.loop_owner
        if owner is None:
            return OWN_TENSORS_ADVICE
        return f"The {owner.name}'s tensors are counted from now on: {owner.first_step(nbytes)}"
