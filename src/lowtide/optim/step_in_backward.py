"""The optimizer's step for one parameter at a time, inside of the backward pass.

The user's loop does not change: its `optimizer.step()` finds nothing to do. Code that reads gradients after
the backward pass, or parameters before `optimizer.step()`, gets an error (see `updated_parameter`).

A pass that adds to no parameter's `.grad` (`torch.autograd.grad`, `backward(inputs=...)`) and a pass in eval
mode update nothing: gradients leave the graph as in eager. A pass that would not give eager's parameters is
refused before it begins.

Where all gradients fit into the budget, the first step is a trial: parameters change only in
`optimizer.step()`, so that a loop which does something else before is refused before anything has changed.
Shortcoming: elsewhere the parameters have changed when such a loop is refused.
"""

import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.errors import Unsupported
from lowtide.optim.awaited_step import AwaitedSteps, settings_of
from lowtide.optim.joined_optimizers import Arguments, has_arguments, run_closure
from lowtide.optim.resting_step import RESTING_CHUNK_BYTES, RestingStep
from lowtide.optim.split_step import settings_return, take_step
from lowtide.optim.updated_parameter import LEAVE_OUT, UsedGradient, is_zero
from lowtide.torch_compat.autograd_engine import (
    BackwardCall,
    GradientUse,
    ProcessPatch,
    around_engine,
    gradient_hooks,
    graph_is_kept,
    is_compiled_graph,
    is_leaf_node,
    nodes_after_this,
    nodes_before_leaves,
    use_of_gradient,
)
from lowtide.torch_compat.gradient_edges import is_inside_planned_graph
from lowtide.torch_compat.modules import hooks_before_step

logger = logging.getLogger("lowtide")

Optimizer = torch.optim.Optimizer

_NUMBERS = itertools.count(1)
_OPEN: "weakref.WeakValueDictionary[int, StepInBackward]" = weakref.WeakValueDictionary()


class StepInBackward:
    """Takes the optimizers' steps for one model's parameters in the backward pass, from `open` to `close`.

    Graphs name it by its `number`, and a parameter by its index in `parameters`. `resting` takes the steps of
    parameters whose state rests. `spare_bytes`: the free bytes of the budget. `gradients_stay` is told the
    bytes of gradients that a pass in eval mode leaves.
    """

    def __init__(
        self,
        optimizers: Iterable[Optimizer],
        model: nn.Module,
        *,
        within_parameters: bool,
        resting: RestingStep | None = None,
    ) -> None:
        self.optimizers = list(optimizers)
        self.within_parameters = within_parameters
        self.resting = resting
        self.owner = {
            id(parameter): optimizer
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        named = [(name, p) for name, p in model.named_parameters() if id(p) in self.owner]
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.place = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self.number = next(_NUMBERS)
        self.spare_bytes = 0
        self.gradients_stay: Callable[[int], None] = lambda nbytes: None
        self.is_tried = False
        """a first step has shown that the loop takes its steps right after its backward passes"""
        self._model = weakref.ref(model)
        self._uses: dict[int, GradientUse] = {}
        """what the running pass does with the gradients of its graph's parameters"""
        self._settings: dict[int, list[dict[str, Any]]] = {}
        """the settings that the running pass uses, by optimizer; empty where it updates nothing"""
        self._updated: list[int] = []
        """the parameters that the running pass has updated"""
        self._is_trial = False
        self._kept: dict[int, Tensor] = {}
        """in a trial, the gradients of the running pass, by parameter"""
        self.awaited = AwaitedSteps()
        self._used: dict[int, list[tuple[Tensor, UsedGradient]]] = {}
        self._hooks: list[Any] = []
        self._first_hooks: dict[int, Any] = {}
        self._in_step = False
        self._release = ExitStack()

    def open(self) -> None:
        """Let `optimizer.step()` of the user's loop find nothing to do."""
        self._refuse_hooks(self.place.values())
        _OPEN[self.number] = self
        for optimizer in self.optimizers:
            self._first_hooks[id(optimizer)] = optimizer.register_step_pre_hook(self._before_step)
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))
            self._hooks.append(optimizer.register_state_dict_pre_hook(self._before_saving))
            self._hooks.append(optimizer.register_load_state_dict_post_hook(self.awaited.note_replaced))
        if self.resting is not None:
            self._hooks += self.resting.open(self.optimizers)
        self._release.close()
        for patch in (_REFUSED_SCALERS, _WATCHED_ENGINE):
            self._release.callback(patch.hold(self))

    def close(self) -> None:
        _OPEN.pop(self.number, None)
        for hook in (*self._hooks, *self._first_hooks.values()):
            hook.remove()
        self._hooks, self._first_hooks = [], {}
        if self.resting is not None:
            self.resting.close(self.optimizers)
        self._clear()
        self._release.close()

    # before a backward pass

    def check(self, call: BackwardCall, edges: Mapping[int, Sequence[Any]]) -> None:
        """Refuse a backward pass that would not give eager's parameters, before it begins. `edges`: the nodes
        of autograd with an edge to each parameter, by identity."""
        own = {place: edges[key] for key, place in self.place.items() if key in edges}
        own = {place: nodes for place, nodes in own.items() if any(map(is_compiled_graph, nodes))}
        if not own:
            return
        self._refuse_second()
        only = call.leaves
        added = [place for place in own if not only or id(self.parameters[place]) in only]
        if not call.adds or not added or not self._is_training:
            return
        self._refuse(added, keeps_graph=call.keeps_graph)
        for place in added:
            others = [node.name() for node in own[place] if not is_compiled_graph(node)]
            if others:
                raise Unsupported(
                    f"the loss uses '{self.names[place]}' outside of the model too ({others[0]}), so that "
                    f"its gradient is not final where the step in backward would use it: {LEAVE_OUT}"
                )
            if len(own[place]) > 1:
                raise Unsupported(
                    f"one backward() for {len(own[place])} calls of the model, whose gradients must be "
                    "summed before the parameters change: call backward() and optimizer.step() after each "
                    f"call, or {LEAVE_OUT}"
                )

    def begin(self) -> None:
        """A graph's backward pass begins: decide which parameters it updates."""
        nodes = [node for node in nodes_after_this() if node is not None and is_leaf_node(node)]
        own = {self.place[id(n.variable)]: n for n in nodes if id(n.variable) in self.place}
        self._uses = {place: use_of_gradient(node) for place, node in own.items()}
        self._settings, self._updated = {}, []
        added = [place for place, use in self._uses.items() if use is GradientUse.ADDED]
        if not self._is_training:
            self.gradients_stay(sum(self.parameters[place].nbytes for place in added))
            return
        if added:
            self._refuse_second()
            self._refuse(added, keeps_graph=graph_is_kept())
            self._clear()
            nbytes = sum(self.parameters[place].nbytes for place in added)
            self._is_trial = not self.is_tried and nbytes <= self.spare_bytes
            self._settings = {id(optimizer): settings_of(optimizer) for optimizer in self.optimizers}

    @property
    def _is_training(self) -> bool:
        model = self._model()
        return model is not None and model.training

    def _refuse(self, places: Sequence[int], *, keeps_graph: bool) -> None:
        if keeps_graph:
            raise Unsupported(
                f"backward(retain_graph=True) would run again with parameters that change now: {LEAVE_OUT}"
            )
        present = [self.names[place] for place in places if not is_zero(self.parameters[place].grad)]
        if present:
            raise Unsupported(
                f"'{present[0]}' has a gradient before the backward pass, to which this one would be added: "
                f"call zero_grad() first, or {LEAVE_OUT}"
            )
        self._refuse_hooks(places)

    def _refuse_second(self) -> None:
        if self.awaited:
            raise self.awaited.refusal(
                "a second backward pass before optimizer.step(), as in gradient accumulation: its gradients "
                "must be summed before the parameters change. Call optimizer.step() after each"
            )

    def _refuse_hooks(self, places: Iterable[int]) -> None:
        for place in places:
            if _has_hooks(self.parameters[place]):
                raise Unsupported(
                    f"'{self.names[place]}' has a hook that waits for its gradient, which the step in "
                    f"backward uses up: remove the hook, or {LEAVE_OUT}"
                )

    # in a backward pass

    def update(self, index: int, gradient: Tensor) -> Tensor | None:
        """Take the step of one parameter and mark its gradient as used. Where this pass updates nothing, the
        gradient that it returns or adds."""
        if not self._settings:
            return None if self._uses.get(index) is GradientUse.NONE else gradient
        if self._uses.get(index) is not GradientUse.ADDED:
            return None
        parameter = self.parameters[index]
        if gradient.stride() != parameter.stride():
            # autograd's strides for `.grad`
            gradient = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
        self._updated.append(index)
        if self._is_trial:
            self._kept[index] = gradient
            parameter.grad = UsedGradient.of(parameter)
        else:
            self._take_step(parameter, gradient)
        return None

    def _take_step(self, parameter: Tensor, gradient: Tensor) -> None:
        parameter.grad = gradient
        owner, within = self.owner[id(parameter)], self.within_parameters
        try:
            with settings_return(owner):
                if self.resting is not None and self.resting.state.has(parameter):
                    self.resting.take(
                        owner, [parameter], within_parameters=within, chunk_bytes=RESTING_CHUNK_BYTES
                    )
                else:
                    take_step(owner, [parameter], within_parameters=within)
        finally:
            parameter.grad = UsedGradient.of(parameter)

    def end(self) -> None:
        """The graph's backward pass has ended: `optimizer.step()` must come next."""
        for place in self._updated:
            parameter = self.parameters[place]
            owner = self.owner[id(parameter)]
            settings, gradient = self._settings[id(owner)], self._kept.get(place)
            self.awaited.add(owner, settings, parameter, self.names[place], gradient)
        if not self._in_step:
            for optimizer in self.optimizers:
                self._come_last(optimizer)
        self._settings, self._updated, self._kept = {}, [], {}

    def _come_last(self, optimizer: Optimizer) -> None:
        """Let other hooks before `optimizer.step()` run while parameters cannot be read."""
        if hooks_before_step(optimizer)[-1] != self._before_step:
            self._first_hooks[id(optimizer)].remove()
            self._first_hooks[id(optimizer)] = optimizer.register_step_pre_hook(self._before_step)

    def abort(self) -> None:
        """Clean up after a backward pass that failed or was interrupted; its updates stay."""
        used = sum(isinstance(parameter.grad, UsedGradient) for parameter in self.parameters)
        taken = 0 if self._is_trial else used
        self._clear()
        if taken:
            logger.warning(
                "the backward pass ended early, when %d of %d parameters had been updated in it: load your "
                "last checkpoint before you go on",
                taken,
                len(self.parameters),
            )

    # between two backward passes

    @contextmanager
    def calling_model(self) -> Iterator[None]:
        """The context of a call of the model: refuse it between `backward()` and `optimizer.step()`; hide
        used gradients, which torch's tracer would read."""
        if self.awaited:
            raise self.awaited.refusal(
                "the model is called between backward() and optimizer.step(), but the step in backward comes "
                "before: call optimizer.step() right after each backward(), without exception"
            )
        used = [(p, p.grad) for p in self.parameters if isinstance(p.grad, UsedGradient)]
        for parameter, _ in used:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in used:
                parameter.grad = gradient

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Arguments | None:
        """Run a closure, which calls backward; refuse a step that differs from the steps taken in backward;
        hide used gradients."""
        if has_arguments(args, kwargs) and hooks_before_step(optimizer)[-1] != self._before_step:
            raise Unsupported(
                "a hook before optimizer.step(closure) was registered after the plan was applied, and would "
                "run after the closure, whose backward() takes the step: register the hook before, or "
                + LEAVE_OUT
            )
        self._in_step = True
        try:
            arguments = run_closure(args, kwargs) if has_arguments(args, kwargs) else (args, kwargs)
        finally:
            self._in_step = False
        if arguments is None:
            raise Unsupported(
                "optimizer.step(closure) runs a backward pass inside of a step that is not torch's own: call "
                f"it without a closure, or {LEAVE_OUT}"
            )
        own = [p for group in optimizer.param_groups for p in group["params"]]
        is_awaited = self.awaited.has(optimizer)
        used = [(p, p.grad) for p in own if isinstance(p.grad, UsedGradient)]
        if not is_awaited and any(not gradient.is_zero for _, gradient in used):
            raise Unsupported(
                "optimizer.step() a second time with the gradients of one backward pass, which has used "
                f"them: call zero_grad() between two steps, or {LEAVE_OUT}"
            )
        if is_awaited:
            self.awaited.confirm(optimizer, self._take_step)
            self.is_tried = True
        used = [(p, p.grad) for p in own if isinstance(p.grad, UsedGradient)]
        self._used[id(optimizer)] = used
        for parameter, _ in used:
            parameter.grad = None
        return arguments

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        for parameter, gradient in self._used.pop(id(optimizer), ()):
            parameter.grad = gradient

    def _before_saving(self, optimizer: Optimizer) -> None:
        if self.awaited.has(optimizer):
            raise self.awaited.refusal(
                "optimizer.state_dict() is called between backward() and optimizer.step(), but the step in "
                "backward comes before: save it after optimizer.step()"
            )

    def _clear(self) -> None:
        self._settings, self._updated, self._kept = {}, [], {}
        self.awaited.clear()
        for parameter in self.parameters:
            if isinstance(parameter.grad, UsedGradient):
                parameter.grad = None


def _has_hooks(parameter: Tensor) -> bool:
    """Whether a hook that is not lowtide's waits for a parameter's gradient."""
    hooks = gradient_hooks(parameter)
    return any(not str(getattr(hook, "__module__", "")).startswith("lowtide.") for hook in hooks)


@contextmanager
def taking_updates(number: int) -> Iterator[None]:
    """The context of a backward pass that takes steps."""
    updates = _OPEN[number]
    updates.begin()
    try:
        yield
    except BaseException:
        updates.abort()
        raise
    updates.end()


def update_parameter(number: int, index: int, gradient: Tensor) -> Tensor | None:
    """An op of backward graphs: take the step of one parameter, or return its gradient."""
    return _OPEN[number].update(index, gradient)


@contextmanager
def _watched(call: BackwardCall) -> Iterator[None]:
    """The context of any backward pass of this process."""
    every = list(_OPEN.values())
    edges = nodes_before_leaves(call.roots) if every else {}
    for updates in every:
        updates.check(call, edges)
    before = {updates.number for updates in every if updates.awaited}
    try:
        yield
    except BaseException:
        for updates in every:
            if updates.awaited and updates.number not in before:
                updates.abort()
        raise


_WATCHED_ENGINE = around_engine(_watched, unless=is_inside_planned_graph)


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse to scale the loss of a model with steps in backward, which would use scaled gradients."""

    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        if self.is_enabled() and _reaches(outputs):
            raise Unsupported(
                "GradScaler scales the loss of a model whose parameters are updated in the backward pass, "
                f"before their gradients could be unscaled: {LEAVE_OUT}"
            )
        return original(self, outputs)

    return scale


_REFUSED_SCALERS = ProcessPatch(torch.amp.GradScaler, "scale", _refusing)


def _reaches(outputs: Any) -> bool:
    """Whether a backward pass from `outputs` reaches a parameter that is updated in backward."""
    own = {id(parameter) for updates in _OPEN.values() for parameter in updates.parameters}
    leaves = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    nodes = [leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    return not own.isdisjoint(nodes_before_leaves(nodes))
