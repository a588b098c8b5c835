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
from lowtide.runtime.loop_watch import LiveLoss, LoopWatch, node_behind, weakly
from lowtide.runtime.pending_calls import PendingCalls
from lowtide.torch_compat import autograd_engine
from lowtide.torch_compat.aot_autograd import has_gaps, in_another_order, order_of
from lowtide.torch_compat.dispatch import WeakStorages
from lowtide.torch_compat.modules import route_of
from lowtide.trace.model_call import tensors_in
from lowtide.trace.tangents import GRADIENT_HAS_OTHER_STRIDES
from lowtide.units import format_size, size_and_bytes

logger = logging.getLogger("lowtide")

SMALL_BYTES = 4096
MANY_GRAPHS = 24
LARGE_SHARE = 0.25
MARKER = "_lowtide_plan"
"""The attribute of a planned model for its `Marker`."""

OUTPUTS_LIVE = (
    "the loop keeps %s (%d bytes) of the model's outputs live through the backward pass, but the plan was "
    "made with holds_outputs=False: the peak is higher by that much. Drop the outputs before backward(), as "
    "in loss = model(...).loss, or plan with holds_outputs=True"
)
OUTPUTS_COUNTED = (
    "the loop keeps %s (%d bytes) of the last step's outputs live through the next forward pass, which the "
    "plan counts and pays for with recompute: `del` them before backward() and plan with holds_outputs=False "
    "to save these bytes"
)
OUTPUTS_COLLECTED = (
    "the loop keeps %s (%d bytes) of earlier outputs live besides those of the last call, and the plan does "
    "not count them: the peak is higher by that much, and by more with every step where a list collects "
    "them. Keep numbers (`.item()`) or a file instead, `del` what is not needed, or plan with reserve=%d"
)
GRAPH_KEPT = (
    "backward(retain_graph=True) keeps saved activations live to its end, and another pass adds to the "
    "gradients of this one: %s that the plan does not count, and the peak is higher by about that much. Add "
    "up the losses and call backward() once, or plan for a budget that is smaller by %d bytes"
)
OTHER_STRIDES = (
    f"{GRADIENT_HAS_OTHER_STRIDES}: the last bits of this step can differ, since torch copies the gradient "
    "into the output's order first, and eager does not. The gradient is planned for from the next step on"
)
WITH_GAPS = (
    "a gradient reaches a graph of the model with gaps between its elements in memory, as that of the real "
    "part of complex numbers does: torch copies the gradient without them first, and eager does not, so that "
    "the last bits can differ. Compute these numbers in the model's forward, without hooks in between"
)
TWO_CALLS_LIVE = (
    "the model is called again before the backward pass of its last call, which keeps %s live, and the plan "
    "does not count these bytes: the peak is higher by that much. Run backward() after each call, or plan "
    "for a budget that is smaller by %d bytes"
)
SEVERAL_CALLS = (
    "the model is called %d times before a backward pass, and earlier calls keep up to %s live that the plan "
    "does not count: this step may be over the budget by that much. From the next step on, graphs are "
    "planned for all calls of a step together"
)
CALLS_EXCEED = (
    "the calls of the model before this backward pass keep %s more live than they were planned for together: "
    "the peak of this step is higher by up to that much, and graphs are planned again for such calls"
)
TWO_CALLS_SUMMED = (
    "the model is called twice before a backward pass and uses '%s' several times in a call: each call sums "
    "its own gradients, so that the last bits can differ from eager's. Run backward() after each call"
)
EARLIER_GRADIENTS = (
    "%s of gradients are live before the forward pass, and the plan does not count them: the peak is higher "
    "by that much. Set gradients to None first (zero_grad), or, to accumulate gradients, plan with "
    "accumulate=True"
)
GRADIENTS_STAY = (
    "backward() in eval mode leaves %s of gradients, which the step in backward would use in training mode, "
    "and the plan does not count them: the peak is higher by up to that much. Call model.train() before "
    "backward(), use torch.autograd.grad for the gradient of an input, or leave step_in_backward out"
)
MANY_GRAPHS_PLANNED = (
    "%d graphs were planned so far, which took %.0f%% of the time since the plan was applied: every new "
    "shape, and every new value of a Python number that the forward reads, is a graph of its own. Pad "
    "batches to a few lengths (pad_to_multiple_of=64, say), and pass numbers that change as tensors"
)
WEIGHTS_CHANGED = (
    "weights have changed since this block of autocast began: eager PyTorch would go on with its casts of "
    "the old weights, a plan casts the new ones. Begin a new block in each step"
)
VIEW_USED = (
    "the loss uses a view of '%s' that the model returns, and the model itself uses that tensor several "
    "times: the last bits of its gradient can differ from eager's. Return a copy of the view (`.clone()`), "
    "or make the view outside of the model"
)
CAST_OUTSIDE = (
    "the loss uses '%s' outside of the model, too, cast to another dtype: in one block of autocast, eager "
    "casts it once and adds up all its gradients in that dtype, so that the last bits can differ. Compute "
    "this part of the loss in the model's forward, or in another block of autocast"
)
PROFILER_IS_ON = (
    "a profiler is on, so that the bytes that the loop makes between the forward and the backward pass "
    "cannot be measured: they are counted from the first step on that runs without it"
)
IN_OWN_LOOP = {
    OTHER_STRIDES: "; pass `loss=` to plan for it from the first step",
    PROFILER_IS_ON: ". Pass `loss=` the function that your loop uses, to have it counted now",
}
"""What else to do in a loop of one's own."""
IN_TRAINER = {
    PROFILER_IS_ON: ". Begin to profile after the first step, or leave as much free with reserve=",
}
"""What to do where a trainer has the loop."""
BYPASSED = (
    "the model got gradients, but %s, so that the budget is not kept: call model(...) itself, not "
    "model.forward(...), and not from inside of torch.compile"
)
COPIED = "a copy of a planned model trains without a plan: apply one to it with plan.apply(copy)"
SAVED = (
    "a planned model was saved without its plan: save the plan with plan.save(path), and apply it after "
    "loading"
)


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
        self._own_tensors = own_tensors
        self.in_trainer = False
        """whether a trainer has the loop"""
        self._kept = KeptOutputs(own_tensors)
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
        self._num_forwards = 0
        self._said: set[str] = set()
        self._outputs: list[weakref.ref[Tensor]] = []
        self._storages = WeakStorages(())
        self._batch: list[weakref.ref[Tensor]] = []
        self._backwards_at_call = -1
        self._is_second_call = False  # before the backward pass of an earlier one
        self._pending_node: Callable[[], Any] = weakly(None)
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
            advice = IN_TRAINER if self.in_trainer else IN_OWN_LOOP
            logger.warning(text + advice.get(text, ""), *values)

    def never_say(self, text: str) -> None:
        self._said.add(text)

    # events, in the order of a step

    def call_begins(self, parameters: Sequence[nn.Parameter], batch: Any = ()) -> None:
        is_watched = self.pending.most > 1
        self.pending.call_begins(besides=(*self._own_tensors(), *tensors_in(batch)) if is_watched else ())
        if self.spare_bytes is not None and EARLIER_GRADIENTS not in self._said:
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
        self.fingerprints = []

    def several_calls(self) -> None:
        """A call has ended, and no backward pass of an earlier one has begun."""
        number = self.pending.position + 1
        if self.planned_calls is None or number <= max(self.planned_calls, self.num_calls):
            return
        trained_bytes = sum(tensor.nbytes for tensor in self._own_tensors() if tensor.requires_grad)
        nbytes = max(self.pending.expected_bytes, trained_bytes - self.earlier_gradient_bytes)
        if self._exceeds(nbytes):
            self.num_calls = number
            self.say(SEVERAL_CALLS, number, size_and_bytes(nbytes))

    def graph_ran(self, saved_bytes: int, *, fingerprint: str = "", results: Sequence[Any] = ()) -> None:
        """A graph's forward pass has ended, with what it returns and saves as `results`."""
        self.fingerprints.append(fingerprint)
        if self.pending.most > 1:
            self.pending.sees(results)
        self._num_forwards += 1
        self.graphs_in_call += 1
        self.saved_bytes += saved_bytes

    def call_ends(self, output: Any, batch: Any) -> None:
        self.returned_outputs(output)
        self._backwards_at_call = self.num_backwards
        self._pending_node = weakly(node_behind(output))
        given = [*tensors_in(output), *tensors_in(batch)]
        if self.pending.most > 1:
            self.pending.sees(given)
        given_bytes = sum(tensor.nbytes for tensor in given)
        self.pending.call_ends(self._pending_node, self.saved_bytes + given_bytes)
        if OUTPUTS_LIVE not in self._said:
            outputs = [tensor for tensor in tensors_in(output) if tensor.dim()]
            self._outputs = [weakref.ref(tensor) for tensor in outputs]
            if not self.may_keep_outputs:
                self._storages = WeakStorages(outputs)
                self._batch = [weakref.ref(tensor) for tensor in tensors_in(batch)]

    def returned_outputs(self, output: Any) -> None:
        """A call has returned, one without gradients included."""
        if self.spare_bytes is not None and OUTPUTS_COLLECTED not in self._said:
            self._kept.call_returned(output)

    def live_last_outputs(self, batch: Any, *, counted_bytes: int) -> int:
        """The bytes of the last outputs that are live when a call with `batch` begins; 0 where outputs of
        more calls are, which is said, or where a backward pass of them can still come."""
        if self.spare_bytes is None or self.has_pending_call or OUTPUTS_COLLECTED in self._said:
            return 0
        live = self._kept.live_bytes(batch, counted_bytes=counted_bytes)
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
        if is_first and self.spare_bytes is not None and OUTPUTS_COLLECTED not in self._said:
            self._say_collected(self._kept.live_bytes_before())
        self.pending.backward_begins()
        if GRAPH_KEPT not in self._said and autograd_engine.graph_is_kept():
            trained_bytes = sum(tensor.nbytes for tensor in self._own_tensors() if tensor.requires_grad)
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
        # storages, since a view or `output.detach()` keeps an output as well
        if not self.may_keep_outputs and self._storages.live_bytes() > SMALL_BYTES:
            besides = (*self._own_tensors(), *_alive(self._batch))
            nbytes = self._storages.live_bytes(besides=besides)
            if nbytes > SMALL_BYTES:
                self.say(OUTPUTS_LIVE, format_size(nbytes), nbytes)
        self._outputs, self._batch, self._storages = [], [], WeakStorages(())

    # what the runner asks

    @property
    def has_pending_call(self) -> bool:
        """Whether the backward pass of the last call can still come."""
        return self._backwards_at_call == self.num_backwards and self._pending_node() is not None

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

    def watch_gaps(self, results: Any) -> None:
        """See whether the gradients of a graph's results have gaps in memory.

        Other strides of gradients between two graphs are known from the capture. Only those of the model's
        outputs are new: they depend on the loop.
        """

        def look(gradient: torch.Tensor | None) -> None:
            if gradient is not None and has_gaps(gradient):
                self.say(WITH_GAPS)

        for tensor in _differentiable(results):
            tensor.register_hook(look)  # type: ignore[no-untyped-call]

    def _watch_strides(self, output: torch.Tensor) -> None:
        shape, strides, order = output.shape, output.stride(), order_of(output)

        def look(gradient: torch.Tensor | None) -> None:
            if gradient is None or order in self.orders:
                return
            if in_another_order(shape, strides, gradient.stride()):
                self.orders[order], self._has_new_strides = order_of(gradient), True
                self.say(OTHER_STRIDES)

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


class Marker:
    """An attribute of a planned model: notices copies of the model, and gradients that bypass the plan.

    A pickled model has None in its place.
    """

    def __init__(self, model: nn.Module, observer: LoopObserver, *, route: Any) -> None:
        self._observer = observer
        self._model, self._route = weakref.ref(model), weakref.ref(route)
        self._backwards = observer.num_backwards
        self._parameter = next((p for p in model.parameters() if p.requires_grad), None)
        self._handle = None
        if self._parameter is not None:
            hook = _weak_hook(weakref.WeakMethod(self._gradient_arrives))
            self._handle = self._parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _gradient_arrives(self) -> None:
        """A gradient without a planned backward pass before it bypassed the plan."""
        model, backwards = self._model(), self._observer.num_backwards
        if model is not None and backwards == self._backwards:
            is_compiled = route_of(model) is not self._route()
            cause = "model.compile() took the place of its plan" if is_compiled else "its plan did not run"
            self._observer.say(BYPASSED % cause)
        self._backwards = backwards

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> "CopyMarker | None":
        # attributes are copied in their order, the parameters first
        copied = memo.get(id(self._parameter))
        return None if copied is None else CopyMarker(self._observer, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        self._observer.say(SAVED)
        return type(None), ()


def _weak_hook(event: "weakref.WeakMethod[Callable[[], None]]") -> Callable[[Any], None]:
    def hook(_parameter: Any) -> None:
        if (told := event()) is not None:
            told()

    return hook


class CopyMarker:
    """An attribute of a planned model's copy, until the copy gets its own plan."""

    def __init__(self, observer: LoopObserver, parameter: nn.Parameter) -> None:
        self._handle = parameter.register_post_accumulate_grad_hook(lambda _: observer.say(COPIED))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        self._handle.remove()

    def __deepcopy__(self, _memo: Any) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def mark(model: nn.Module, observer: LoopObserver, *, route: Any) -> None:
    """Watch a model that runs by a plan; its calls go to `route`."""
    unmark(model)
    vars(model)[MARKER] = Marker(model, observer, route=route)


def unmark(model: nn.Module) -> None:
    marker = vars(model).pop(MARKER, None)
    if marker is not None:
        marker.remove()
