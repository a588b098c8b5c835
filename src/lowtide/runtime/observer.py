"""Observe the user's loop around one planned model, and say once where the loop departs from the plan.

    call_begins ── graph_ran ── call_ends ── [watch_loss] ── backward_begins ── backward_ends ── call_begins
                                                  │                  │
                                  gradient_strides, LoopWatch    output_used

Backend and runner send events to the observer. The runner asks for `news` before each call and plans graphs
again where needed. Other code reads `view`. An observer refers to the model and its output only weakly: torch
keeps the functions of graphs, which refer to the observer, longer than the model lives.
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.errors import Unsupported
from lowtide.optim.updated_parameter import gradient_bytes
from lowtide.runtime.kept_outputs import KeptOutputs
from lowtide.runtime.loop_messages import (
    EARLIER_GRADIENTS,
    GRADIENTS_STAY,
    GRAPH_KEPT,
    IN_LOOP_OF_OTHERS,
    IN_OWN_LOOP,
    MANY_GRAPHS_PLANNED,
    OUTPUTS_COLLECTED,
    OUTPUTS_LIVE,
    PATH_LONGER,
    SEVERAL_CALLS,
    TWO_CALLS_LIVE,
    TWO_CALLS_SUMMED,
    LoopOwner,
)
from lowtide.runtime.loop_watch import LiveLoss, LoopWatch, node_behind, weakly
from lowtide.runtime.pending_calls import PendingCalls
from lowtide.torch_compat import autograd_engine
from lowtide.torch_compat.aot_autograd import in_another_order, order_of
from lowtide.torch_compat.dispatch import WeakStorages
from lowtide.trace.model_call import tensors_in
from lowtide.units import format_size, size_and_bytes

logger = logging.getLogger("lowtide")

SMALL_BYTES = 4096
MANY_GRAPHS = 24
LARGE_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class LoopView:
    """The public state of an observer: how often graphs ran, and the bytes of the last output's tensors that
    live."""

    num_forwards: int
    num_backwards: int
    live_output_bytes: int


@dataclass(frozen=True, slots=True)
class LoopNews:
    """The events of the last step that the plan does not expect.

    `loss`: the bytes between forward and backward pass. `used`: outputs with an unexpected gradient, by the
    fingerprint of their graph. `has_new_strides`: gradients had other strides than their outputs.
    """

    loss: LiveLoss | None
    used: dict[str, set[int]]
    has_new_strides: bool


class LoopObserver:
    """The state of one planned model's loop.

    `spare_bytes`: the free bytes of the budget; None where no budget was given. `earlier_gradient_bytes`: of
    earlier passes, which the plan counts. `may_keep_outputs`: the plan
    counts the model's outputs as live through the backward pass. `orders` gets the strides of gradients that
    differ from their outputs'. `own_tensors`: the model's, which may be among its outputs.
    """

    def __init__(
        self,
        *,
        spare_bytes: int | None = None,
        earlier_gradient_bytes: int = 0,
        may_keep_outputs: bool = True,
        orders: dict[str, str] | None = None,
        own_tensors: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        self.own_tensors = own_tensors
        self.loop_owner: LoopOwner | None = None
        """who has the loop, where that is not the user's own code"""
        self.kept = KeptOutputs(own_tensors)
        self.when_backward_begins: Callable[[], None] = lambda: None
        """called once after each call of the model"""
        self.counts_gradients = False
        """whether graphs are planned beside gradients of earlier passes"""
        self.spare_bytes = spare_bytes
        self.may_keep_outputs = may_keep_outputs
        self.orders = {} if orders is None else orders
        self.earlier_gradient_bytes = earlier_gradient_bytes
        self.num_backwards = 0
        self.graphs_in_call = 0
        self.saved_bytes = 0
        """of this call's graphs, for the backward pass"""
        self.summed_weight = ""
        """a weight whose gradient is a sum inside a graph"""
        self.summed_in_cast = ""
        """a weight whose terms cannot leave the graph"""
        self.pending = PendingCalls()
        self.num_calls = 1
        """the calls of a step that do not fit into the budget as they were planned"""
        self.planned_calls: int | None = None
        """the calls of a step that are planned together; None where calls are not planned together"""
        self.fingerprints: list[str] = []
        """of this call's graphs"""
        self.saved_by_graph: list[int] = []
        """bytes for the backward pass, of each graph of this call"""
        self._num_forwards = 0
        self._said: set[str] = set()
        self._outputs: list[weakref.ref[Tensor]] = []
        self._storages = WeakStorages(())
        self._batch: list[weakref.ref[Tensor]] = []
        self._graphs_to_end = 0  # backward passes of the last call's graphs
        self._backwards_at_call = -1
        self._is_second_call = False  # before the backward pass of an earlier one
        self._watch: LoopWatch | None = None
        self._used: dict[str, set[int]] = {}
        self._has_new_strides = False

    def view(self) -> LoopView:
        nbytes = WeakStorages(_alive(self._outputs)).live_bytes()
        return LoopView(self._num_forwards, self.num_backwards, nbytes)

    def say(self, text: str, *values: Any) -> None:
        """Warn, once for each text."""
        if text not in self._said:
            self._said.add(text)
            own, others = IN_OWN_LOOP.get(text, ""), IN_LOOP_OF_OTHERS.get(text, "")
            advice = own if self.loop_owner is None else others.replace("%s", self.loop_owner.reserve.strip())
            logger.warning(text + advice, *values)

    def never_say(self, text: str) -> None:
        self._said.add(text)

    # events, in the order of a step

    def call_begins(self, parameters: Sequence[nn.Parameter], batch: Any = ()) -> None:
        is_watched = self.pending.most > 1
        self.pending.call_begins(besides=(*self.own_tensors(), *tensors_in(batch)) if is_watched else ())
        is_told = self.counts_gradients or EARLIER_GRADIENTS in self._said
        if self.spare_bytes is not None and not is_told:
            nbytes = sum(map(gradient_bytes, parameters))
            if nbytes and self._exceeds(nbytes - self.earlier_gradient_bytes):
                self.say(EARLIER_GRADIENTS, format_size(nbytes))
        self._is_second_call = self.has_pending_call
        if self._is_second_call:
            if self.planned_calls is None and self._exceeds(self.saved_bytes):
                self.say(TWO_CALLS_LIVE, format_size(self.saved_bytes), self.saved_bytes)
            weight = self.summed_in_cast or self.summed_weight
            if weight:
                self.say(TWO_CALLS_SUMMED, weight)
        self.graphs_in_call = self.saved_bytes = 0
        self.fingerprints, self.saved_by_graph = [], []

    def several_calls(self) -> None:
        """A call has ended, and no backward pass of an earlier one has begun."""
        number = self.pending.position + 1
        if self.planned_calls is None or number <= max(self.planned_calls, self.num_calls):
            return
        trained_bytes = sum(tensor.nbytes for tensor in self.own_tensors() if tensor.requires_grad)
        nbytes = max(self.pending.expected_bytes, trained_bytes - self.earlier_gradient_bytes)
        if self._exceeds(nbytes):
            self.num_calls = number
            self.say(SEVERAL_CALLS, number, size_and_bytes(nbytes))

    def ran_longer(self, nbytes: int) -> None:
        """The graphs of a call save `nbytes` more than planned."""
        if self._exceeds(nbytes):
            self.say(PATH_LONGER, size_and_bytes(nbytes))

    def graph_ran(self, saved_bytes: int, *, fingerprint: str = "", results: Sequence[Any] = ()) -> None:
        """A graph's forward pass has ended, with what it returns and saves as `results`."""
        self.fingerprints.append(fingerprint)
        self.saved_by_graph.append(saved_bytes)
        if self.pending.most > 1:
            self.pending.sees(results)
        self._num_forwards += 1
        self.graphs_in_call += 1
        self.saved_bytes += saved_bytes

    def call_ends(self, output: Any, batch: Any) -> None:
        made, read = list(tensors_in(output)), list(tensors_in(batch))
        self.returned_outputs(made)
        self._backwards_at_call = self.num_backwards
        self._graphs_to_end = sum(map(bool, self.fingerprints))  # a graph without gradients has none
        given = [*made, *read]
        if self.pending.most > 1:
            self.pending.sees(given)
        given_bytes = sum(tensor.nbytes for tensor in given)
        self.pending.call_ends(weakly(node_behind(made)), self.saved_bytes + given_bytes)
        if OUTPUTS_LIVE not in self._said:
            outputs = [tensor for tensor in made if tensor.dim()]
            self._outputs = [weakref.ref(tensor) for tensor in outputs]
            if not self.may_keep_outputs:
                self._storages = WeakStorages(outputs)
                self._batch = [weakref.ref(tensor) for tensor in read]

    def returned_outputs(self, output: Any) -> None:
        """A call has returned, one without gradients included."""
        if self.spare_bytes is not None and OUTPUTS_COLLECTED not in self._said:
            self.kept.call_returned(output)

    def live_last_outputs(self, batch: Any, *, counted_bytes: int) -> int:
        """The bytes of the last outputs that are live when a call with `batch` begins; 0 where outputs of
        more calls are, which is said, or where a backward pass of them can still come."""
        if self.spare_bytes is None or self.has_pending_call or OUTPUTS_COLLECTED in self._said:
            return 0
        live = self.kept.live_bytes(batch, counted_bytes=counted_bytes)
        if len(live) > 1:
            self._say_collected(sum(live) - counted_bytes)
            return 0
        return sum(live)

    def _say_collected(self, nbytes: int) -> None:
        if self._exceeds(nbytes):
            self.say(OUTPUTS_COLLECTED, format_size(nbytes), nbytes, nbytes)

    def graphs_planned(self, number: int, time_share: float) -> None:
        """`time_share` of the time since the plan was applied went into planning `number` graphs."""
        if number >= MANY_GRAPHS and time_share > LARGE_SHARE:
            self.say(MANY_GRAPHS_PLANNED, number, time_share * 100)

    def watch_loss(self, output: Any, *, batch_bytes: int, device: torch.device) -> bool:
        """Watch the bytes that the loop makes of a call's output on `device`, and the strides of the
        gradients. False where the bytes cannot be measured now."""
        for tensor in _differentiable(output):
            self._watch_strides(tensor)
        watch = LoopWatch(batch_bytes, device, may_keep_outputs=self.may_keep_outputs)
        self._watch = watch if watch.begin(output) else None
        return self._watch is not None

    def watch_ends_between_calls(self) -> None:
        """Another call begins: see what the loop made of the last one's output, before its backward pass."""
        watch = self._watch
        if watch is None or watch.has_ended or not self.has_pending_call:
            return
        watch.end(())
        watch.leave()
        if watch.loss is not None:
            self.pending.between_bytes = max(self.pending.between_bytes, watch.loss.kept_bytes)
        self._watch = None

    def backward_begins(self, gradients: Callable[[], Sequence[Any]]) -> None:
        """A graph's backward pass begins, with the gradients of its outputs."""
        is_first = self.num_backwards == self._backwards_at_call and not self._is_second_call
        self.num_backwards += 1
        if is_first:
            self.when_backward_begins()
        if is_first and self.spare_bytes is not None and OUTPUTS_COLLECTED not in self._said:
            self._say_collected(self.kept.live_bytes_before())
        self.pending.backward_begins(autograd_engine.running_node())
        if GRAPH_KEPT not in self._said and autograd_engine.graph_is_kept():
            trained_bytes = sum(tensor.nbytes for tensor in self.own_tensors() if tensor.requires_grad)
            nbytes = self.saved_bytes + max(0, trained_bytes - self.earlier_gradient_bytes)
            if self._exceeds(nbytes):
                self.say(GRAPH_KEPT, format_size(nbytes), nbytes)
        if self._watch is not None:
            self._watch.end([value for value in gradients() if value is not None])

    def output_used(self, fingerprint: str, outputs: frozenset[int]) -> None:
        """Outputs of a graph got unexpected gradients."""
        self._used.setdefault(fingerprint, set()).update(outputs)

    def gradients_stay(self, nbytes: int) -> None:
        """A backward pass leaves gradients where the plan counts on their use."""
        if self._exceeds(nbytes):
            self.say(GRADIENTS_STAY, format_size(nbytes))

    def backward_ends(self) -> None:
        self._graphs_to_end -= 1
        if self._graphs_to_end > 0:
            return  # a graph that comes later in this pass may have saved what the model returns
        # storages, since a view or `output.detach()` keeps an output as well
        if not self.may_keep_outputs and self._storages.live_bytes() > SMALL_BYTES:
            besides = (*self.own_tensors(), *_alive(self._batch))
            nbytes = self._storages.live_bytes(besides=besides)
            if nbytes > SMALL_BYTES:
                self.say(OUTPUTS_LIVE, format_size(nbytes), nbytes)
        self._outputs, self._batch, self._storages = [], [], WeakStorages(())

    # what the runner asks

    def live_loss_bytes(self) -> int:
        """The bytes that the loop still keeps of the last loss, where its step was watched."""
        return 0 if self._watch is None else self._watch.losses.live_bytes(keys=self.kept.storages())

    @property
    def has_pending_call(self) -> bool:
        """Whether the backward pass of an earlier call can still come."""
        return self.pending.are_waiting

    def news(self) -> LoopNews | None:
        """The unexpected events since the last call of this method; None where there were none."""
        loss = None if self._watch is None else self._watch.loss
        found = LoopNews(loss, self._used, self._has_new_strides)
        self._watch, self._has_new_strides = None, False
        return found if found != LoopNews(None, {}, False) else None

    def plans_dropped(self) -> None:
        """Graphs are planned again."""
        self._used = {}

    def _exceeds(self, nbytes: int) -> bool:
        """Whether uncounted bytes exceed the free bytes of the budget."""
        return self.spare_bytes is not None and nbytes > max(0, self.spare_bytes)

    def _watch_strides(self, output: torch.Tensor) -> None:
        shape, strides, order = output.shape, output.stride(), order_of(output)

        def look(gradient: torch.Tensor | None) -> None:
            if gradient is None or order in self.orders:
                return
            if in_another_order(shape, strides, gradient.stride()):
                self.orders[order], self._has_new_strides = order_of(gradient), True

        output.register_hook(look)  # type: ignore[no-untyped-call]


def _differentiable(results: Any) -> Iterator[Tensor]:
    """The tensors of `results` whose gradients have a memory order."""
    return (tensor for tensor in tensors_in(results) if tensor.grad_fn is not None and tensor.dim() > 1)


def _alive(references: Iterable[weakref.ref[Tensor]]) -> list[Tensor]:
    return [tensor for reference in references if (tensor := reference()) is not None]


def ran_without_plan(why: str) -> Unsupported:
    return Unsupported(
        f"the model ran without its plan, since torch.compile gave up on its forward pass ({why}). Is its "
        "code the same as when it was planned? Plan it as it trains, or lowtide.remove(model)"
    )
