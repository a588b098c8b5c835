"""Run a planned model inside the user's own training loop.

The model stays the same object of the same class. Its call is routed through torch.compile with a
backend that rewrites every captured graph by its plan. Without gradients, the model's own code runs.
"""

import itertools
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn, Protocol

import torch
from torch import fx, nn

from lowtide.errors import CaptureError, LowtideError
from lowtide.facts import Kind
from lowtide.offload.offload_store import OffloadStore
from lowtide.optim.split_step import SplitStep
from lowtide.optim.step_in_backward import StepInBackward
from lowtide.parallel.fsdp_units import CompiledUnits, compiled_model
from lowtide.runtime.backend import Backend, GraphSchedule
from lowtide.runtime.backward import refuse_transforms
from lowtide.runtime.call_schedules import CallSoFar, Schedules
from lowtide.runtime.executor import EAGER_OPS, Executor, RecentlyUsed
from lowtide.runtime.loop_look import LoopLook
from lowtide.runtime.loop_messages import (
    CALLS_EXCEED,
    EARLIER_GRADIENTS,
    GRAPH_KEPT,
    OUTPUTS_COLLECTED,
    OUTPUTS_COUNTED,
    PROFILER_IS_ON,
)
from lowtide.runtime.loop_watch import leave
from lowtide.runtime.model_marker import mark, unmark
from lowtide.runtime.observer import SMALL_BYTES, LoopObserver, ran_without_plan
from lowtide.runtime.resting_model import RestingWeights
from lowtide.torch_compat import autograd_engine, ddp, dynamo
from lowtide.torch_compat.allocation_record import users_profiler_is_active
from lowtide.torch_compat.dispatch import in_transform, make_first_calls
from lowtide.torch_compat.dtensor import is_divided
from lowtide.torch_compat.fsdp2 import units_of
from lowtide.torch_compat.modules import call_model, route_of, runs_own_code, set_route
from lowtide.torch_compat.pipelining import is_evaluating
from lowtide.trace import failures
from lowtide.trace.identity import Origin, describe_inputs, layouts, name_tensors
from lowtide.trace.model_call import entrance, tensors_in
from lowtide.trace.segments import Segment, TracedModel
from lowtide.trace.step_device import device_of
from lowtide.units import format_size, size_and_bytes

PLANNED_KINDS = 1024
"""Kinds of calls that are known to be planned; an older kind is checked again."""


MOST_WATCHES = 8
"""Calls that are watched for what the loop makes of new graphs' outputs, where no backward pass follows."""


class Guard(Protocol):
    """Names the failed process, where several train one model, from `open` to `close`."""

    def open(self) -> None: ...

    def close(self) -> None: ...

    def watching(self, when: str) -> AbstractContextManager[None]:
        """The context of a `forward` or `backward` pass."""
        ...


class Runner:
    """A planned model calls its runner instead of its own forward.

    Eager PyTorch runs a batch of the layout `eager_batch`. `planned_batch`: the layout of the planned batch.
    `traced`: the model as traced for the plan. `store`: the store of offloaded values. `resting`: the weights
    that rest there.
    """

    def __init__(
        self,
        model: nn.Module,
        schedules: Schedules,
        *,
        executor: Executor = EAGER_OPS,
        eager_batch: str | None = None,
        planned_batch: str | None = None,
        updates: StepInBackward | None = None,
        split_step: SplitStep | None = None,
        holds_outputs: bool = True,
        traced: TracedModel | None = None,
        store: OffloadStore | None = None,
        resting: RestingWeights | None = None,
    ) -> None:
        self.model = model
        self._is_divided = is_divided(model)
        self.resting = resting
        self.split_step = split_step
        self.updates = updates
        self.schedules = schedules
        self.eager_batch = eager_batch
        self.observer = LoopObserver(
            spare_bytes=schedules.spare_bytes,
            earlier_gradient_bytes=schedules.earlier_gradient_bytes,
            may_keep_outputs=holds_outputs,
            orders=schedules.orders,
            own_tensors=_tensors_of(weakref.ref(model)),
        )
        self.observer.planned_calls = schedules.num_calls
        self.observer.counts_gradients = schedules.counts_gradients
        if schedules.in_pipeline:
            self.observer.never_say(OUTPUTS_COLLECTED)
            self.observer.never_say(GRAPH_KEPT)
        if updates is not None:
            updates.spare_bytes = max(0, schedules.spare_bytes or 0)
            updates.gradients_stay = self.observer.gradients_stay
        self.backend = Backend(
            self._schedules_of,
            origins=self._origins,
            executor=executor,
            updates=updates,
            store=store,
            observer=self.observer,
        )
        self.guard: Guard | None = None
        self._graphs_before = 0
        self._watches_left = 0
        self._told_of_outputs = False
        self._calls_in_watch = 0
        self._batch: Any = ()
        self._may_start_over = True
        self.wrapper: Callable[[], Any] = _nothing  # the DistributedDataParallel whose buckets are counted
        self._start = time.perf_counter()
        self._entrance = entrance(model)
        # read in every step; model.parameters() takes ten times as long
        self._parameters = tuple(model.parameters())
        self._loop = LoopLook(self.observer, self._parameters, device_of(model, ()), schedules)
        self._planned_situation = self._situation()
        self._planned_kinds: RecentlyUsed[Any, bool] = RecentlyUsed(PLANNED_KINDS)
        self._planned_kinds[planned_batch, self._planned_situation] = True
        self.compiled = compiled_model(model, self.backend)
        if traced is not None and traced.take(model) and self.backend.adopt(traced.graph):
            self.compiled = traced.compiled
            traced.compiled.compile_by(self.backend)

    @dynamo.apart  # a user's torch.compile around the model would compile this code
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calling = nullcontext() if self.updates is None else self.updates.calling_model()
        with calling, nullcontext() if self.guard is None else self.guard.watching("forward pass"):
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_exporting():
            return call_model(self.model, args, kwargs)
        if not torch.is_grad_enabled() or is_evaluating() or not self._is_trained(args, kwargs):
            return self._call_without_gradients(args, kwargs)
        self._calls_in_watch = 0
        self.observer.watch_ends_between_calls()
        leave()
        refuse_transforms()
        self._meet_wrapper()
        if self.eager_batch is not None and self._is_left_to_eager(args, kwargs):
            return call_model(self.model, args, kwargs)
        # a call inside of a backward pass is the recompute of the user's own checkpoint
        is_repeated = autograd_engine.in_backward()
        if not is_repeated:
            self._count_loop((args, kwargs))
        self._plan_ahead(args, kwargs)
        autograd_engine.finish_recomputation()
        self.observer.call_begins(self._parameters, (args, kwargs))
        pending = self.observer.pending
        self.schedules.begin_call(pending.position, pending.live_bytes)
        self._batch, breaks = (args, kwargs), dynamo.graph_breaks()
        try:
            output = self._call_planned(args, kwargs)
            if not self.observer.graphs_in_call:
                raise ran_without_plan(next(iter(dynamo.graph_breaks() - breaks), "it gives no reason"))
        except dynamo.TorchDynamoException as error:
            self.compiled.look_again()
            self._raise_as_eager(error)
        except BaseException:
            self.compiled.look_again()
            raise
        finally:
            self._batch, self._may_start_over = (), True
        self._call_ended(output, (args, kwargs), is_repeated=is_repeated)
        return output

    def _call_ended(self, output: Any, batch: Any, *, is_repeated: bool) -> None:
        self.observer.call_ends(output, batch)
        self._loop.call_ends()
        pending = self.observer.pending
        self.observer.spare_bytes = self.schedules.spare_bytes
        if not pending.position and not is_repeated:
            ran = self.observer
            ran.ran_longer(self.schedules.see_path(ran.fingerprints, ran.saved_by_graph))
        if pending.position:
            self.observer.several_calls()
        if pending.position and (excess_bytes := self.schedules.excess_bytes(self.observer.fingerprints)):
            self.observer.say(CALLS_EXCEED, size_and_bytes(excess_bytes))
        if self.backend.num_graphs > self._graphs_before:
            self._graphs_before, self._watches_left = self.backend.num_graphs, MOST_WATCHES
            seconds = time.perf_counter() - self._start
            self.observer.graphs_planned(self.backend.num_graphs, self.compiled.seconds / seconds)
        if self._watches_left and self.schedules.counts_loop and not is_repeated:
            self._watch(output, batch)

    def _count_loop(self, batch: Any) -> None:
        """Plan again where the loop keeps more live than the plan counts, or departed from it before."""
        if self.observer.has_pending_call:
            self._loop.another_call(batch)
        else:
            self._loop.call_begins(batch)
        self._learn()
        self._count_outputs(batch)
        if self.schedules.fit_beside_loop():
            self._forget()

    def _call_without_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's own code, also where a pipeline evaluates, which runs no backward pass. Before one,
        a watch counts its bytes as those of a loss; many such calls are no part of a step."""
        self._calls_in_watch += 1
        if self._calls_in_watch > MOST_WATCHES:
            leave()
        if self.resting is not None:
            self.resting.read_outside()
        output = call_model(self.model, args, kwargs)
        if not in_transform():
            self.observer.returned_outputs(output)
        return output

    def _watch(self, output: Any, batch: Any) -> None:
        """Watch what the loop makes of an output of new graphs, until a watch has seen its backward pass."""
        device = device_of(self.model, batch)
        if self.observer.watch_loss(output, batch_bytes=_nbytes(batch), device=device):
            self._watches_left -= 1
        elif self.schedules.loss_is_unknown and users_profiler_is_active():
            self.observer.say(PROFILER_IS_ON)

    def _learn(self) -> None:
        """Plan again where the last step departed from the plan, and lay weights to rest again."""
        if self.resting is not None:
            self.resting.refresh()
        if self.schedules.count_state():
            self._forget()
        news = self.observer.news()
        if news is not None:
            if news.loss is not None:
                self._watches_left = 0
            is_learned = (news.loss is not None or bool(news.used)) and self.schedules.learn(
                news.loss, news.used
            )
            if is_learned or news.has_new_strides:
                self._forget()
        if not self.observer.has_pending_call:
            pending = self.observer.pending
            if self.schedules.expect_calls(self.observer.num_calls, pending.between_bytes):
                self._forget()
                self.observer.planned_calls = self.schedules.num_calls

    def _count_outputs(self, batch: Any) -> None:
        """Plan again where the loop keeps more of earlier outputs live than the plan counts."""
        counted_bytes = self.schedules.last_output_bytes
        nbytes = self.observer.live_last_outputs(batch, counted_bytes=counted_bytes)
        if nbytes <= SMALL_BYTES:
            return
        if nbytes > counted_bytes:
            if self.schedules.count_outputs(nbytes):
                self._forget()
        elif not self._told_of_outputs:
            self._told_of_outputs = True
            if self.schedules.pays_for_outputs:
                self.observer.say(OUTPUTS_COUNTED, format_size(nbytes), nbytes)

    def _forget(self) -> None:
        """Compile all graphs anew, by new schedules."""
        self.compiled.forget()
        self.backend.forget()
        self.observer.plans_dropped()

    def _meet_wrapper(self) -> None:
        """Plan again where a DistributedDataParallel around the model has buckets that were not counted."""
        wrapper = ddp.active()
        if wrapper is None or wrapper is self.wrapper():
            return
        buckets = ddp.buckets_of(wrapper)
        if buckets.hold_gradients:
            self._loop.counts_gradients = False
            self.observer.never_say(EARLIER_GRADIENTS)  # they are in the buckets, which count
        if self.schedules.count_buckets(buckets):
            self._forget()
            self.eager_batch = None
        if self.guard is not None and route_of(wrapper) is None:
            set_route(wrapper, _Guarded(wrapper, self.guard))
        self.wrapper = weakref.ref(wrapper)

    def _call_planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            with dynamo.user_errors():
                return self.compiled(self.model, args, kwargs)
        except dynamo.StartOver as unknown:
            self.compiled.look_again()
            self._plan_call(args, kwargs, cause=str(unknown))
        self._may_start_over = False
        with dynamo.user_errors():
            return self.compiled(self.model, args, kwargs)

    def _plan_ahead(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan a new kind of call before it begins. Where processes exchange parameters, one process cannot
        start a call over alone."""
        if not isinstance(self.compiled, CompiledUnits):
            return
        kind = (layouts((args, kwargs)), self._situation())
        if not self._planned_kinds.get(kind):
            self._plan_call(args, kwargs, cause="another batch, or another setting of the model")
            self._planned_kinds[kind] = True

    def _plan_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, cause: str) -> None:
        """Plan a call. Where the model's own code raises for this batch, its own exception is raised."""
        try:
            self.schedules.plan_call(args, kwargs, cause=cause)
        except CaptureError:
            self._run_eagerly(args, kwargs)
            raise

    def _schedules_of(self, segment: Segment, is_whole: bool) -> tuple[GraphSchedule, ...]:
        if not isinstance(self.compiled, CompiledUnits) and units_of(self.model):
            raise LowtideError(
                "fully_shard was called on this model after its plan was applied: shard first, then plan "
                "(lowtide.remove(model), and lowtide.checkpoint the sharded model)"
            )
        if is_divided(self.model) and not self._is_divided:
            raise LowtideError(
                "parallelize_module was called on this model after its plan was applied: divide first, then "
                "plan (lowtide.remove(model), and lowtide.checkpoint the divided model)"
            )
        so_far = CallSoFar(
            nothing_ran=self._may_start_over and self.compiled.is_tracing(*self._entrance),
            is_whole=is_whole,
            num_graphs=self.observer.graphs_in_call,
            saved_bytes=self.observer.saved_bytes,
            batch_bytes=_nbytes(self._batch),
        )
        return self.schedules.schedules_of(segment, so_far)

    def _is_trained(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a backward pass through this call has anything to do."""
        if any(parameter.requires_grad for parameter in self._parameters):
            return True
        return any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))

    def _is_left_to_eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return layouts((args, kwargs)) == self.eager_batch and self._situation() == self._planned_situation

    def _situation(self) -> tuple[Any, ...]:
        """The settings of a model that change the bytes of a step."""
        return self.model.training, *((p.requires_grad, p.dtype) for p in self._parameters)

    def _raise_as_eager(self, error: Exception) -> NoReturn:
        """Raise the exception of the model's own code, instead of the compiler's."""
        self._run_eagerly(*self._batch)
        raise ran_without_plan(failures.describe(error)) from error

    def _run_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with torch.no_grad():
            call_model(self.model, args, kwargs)

    def _origins(self, graph: fx.GraphModule) -> list[Origin]:
        """The origins of a graph's inputs; `Kind.OTHER` for values of the model's other graphs."""
        origins = describe_inputs(graph, name_tensors(self.model, self._batch), stranger=Kind.INPUT)
        batch = {id(leaf) for leaf in tensors_in(self._batch)}
        return [
            replace(origin, kind=Kind.OTHER)
            if value is not None and value.grad_fn is not None and id(value) not in batch
            else origin
            for origin, value in zip(origins, dynamo.graph_inputs(graph), strict=True)
        ]


class _Guarded:
    """The route of a wrapper, whose own code communicates with other processes before its model runs."""

    def __init__(self, wrapper: nn.Module, guard: Guard) -> None:
        self.wrapper, self.guard = wrapper, guard

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.guard.watching("forward pass"):
            return call_model(self.wrapper, args, kwargs)


def _tensors_of(model: Callable[[], nn.Module | None]) -> Callable[[], Iterable[torch.Tensor]]:
    def tensors() -> Iterable[torch.Tensor]:
        found = model()
        return () if found is None else itertools.chain(found.parameters(), found.buffers())

    return tensors


def _nothing() -> None:
    return None


def _nbytes(batch: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(batch))


def install(runner: Runner) -> None:
    """Route the calls of the runner's model through its plan, in place of another plan."""
    model = runner.model
    current = route_of(model)
    if not runs_own_code(current) and not isinstance(current, Runner):
        raise LowtideError("this model is already compiled by model.compile(): plan the plain model instead")
    make_first_calls()
    remove(model)
    attach(model, runner)


def attach(model: nn.Module, runner: Runner) -> None:
    """Let `model` run by its runner."""
    for part in (runner.resting, runner.updates, runner.split_step, runner.guard):
        if part is not None:
            part.open()
    set_route(model, runner)
    if runner.eager_batch is None:
        mark(model, runner.observer, route=runner)


def remove(model: nn.Module) -> nn.Module:
    """Remove the plan of a model; returns the same object."""
    inner = ddp.unwrapped(model)
    runner = runner_of(inner)
    if runner is not None:
        for wrapper in (model, runner.wrapper()):
            if isinstance(wrapper, nn.Module) and isinstance(route_of(wrapper), _Guarded):
                set_route(wrapper, None)
        set_route(inner, None)
        for part in (runner.updates, runner.split_step, runner.guard, runner.resting):
            if part is not None:
                part.close()
        autograd_engine.unsilence_hooks(inner.parameters())
        runner.backend.autocast_cache.forget()
        leave()
    unmark(inner)
    return model


def runner_of(model: nn.Module) -> Runner | None:
    """What runs a planned model; None for a plain one."""
    current = route_of(ddp.unwrapped(model))
    return current if isinstance(current, Runner) else None
