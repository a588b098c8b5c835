"""The optimizer's step for one parameter at a time, inside of the backward pass.

The user's loop does not change: its `optimizer.step()` finds nothing to do. Code that reads gradients after
the backward pass gets an error, since they are freed by then.
"""

import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.errors import Unsupported
from lowtide.optim.joined_optimizers import Arguments, has_arguments, run_closure
from lowtide.optim.split_check import same
from lowtide.optim.split_step import take_step
from lowtide.torch_compat.autograd_engine import ProcessPatch, gradient_hooks, graph_is_kept
from lowtide.torch_compat.dispatch import tensor_without_memory, torch_function_off

logger = logging.getLogger("lowtide")

Optimizer = torch.optim.Optimizer

LEAVE_OUT = "leave step_in_backward out"

_NUMBERS = itertools.count(1)
_OPEN: "weakref.WeakValueDictionary[int, StepInBackward]" = weakref.WeakValueDictionary()


class UsedGradient(Tensor):
    """Replaces a gradient that the step in backward has used; has no memory and cannot be read.

    Like a gradient, it stays after `optimizer.step()` until `zero_grad` removes it or makes it zero.
    """

    is_zero = False

    @staticmethod
    def of(parameter: Tensor, like: Tensor | None = None) -> "UsedGradient":
        """A used gradient of `parameter`, of the dtype and on the device of `like` where given."""
        like = parameter if like is None else like
        made: UsedGradient = tensor_without_memory(
            UsedGradient,
            parameter.shape,
            strides=parameter.stride(),
            dtype=like.dtype,
            device=like.device,
        )
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"UsedGradient({tuple(self.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in HARMLESS:
            with torch_function_off():
                return func(*args, **(kwargs or {}))
        if name in ZEROING:
            for gradient in args[0] if isinstance(args[0], (list, tuple)) else [args[0]]:
                if isinstance(gradient, UsedGradient) and "zero" in name:
                    gradient.is_zero = True
            return args[0]
        if name == "_has_compatible_shallow_copy_type":
            return False  # else `module.to(...)` would assign data to this gradient
        if name in MOVING:
            own = args[0]
            like = func(torch.empty(0, dtype=own.dtype, device=own.device), *args[1:], **(kwargs or {}))
            moved = UsedGradient.of(own, like)
            moved.is_zero = own.is_zero
            return moved
        raise Unsupported(
            f"{name}() reads a gradient that the step in backward has used already: for clipping by norm, "
            f"GradScaler, accumulation, or to look at gradients, {LEAVE_OUT}"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise Unsupported(f"{func} reads a gradient that the step in backward has used: {LEAVE_OUT}")


HARMLESS = {"__get__", "__set__", "size", "dim", "stride", "numel", "is_complex", "is_floating_point"}
"""Functions that read no values."""
MOVING = {"to", "cpu", "cuda", "float", "double", "half", "bfloat16"}
"""Functions behind `model.cpu()` and the like, which trainers call at the end."""
ZEROING = {"zero_", "_foreach_zero_", "detach_", "requires_grad_"}
"""Functions that `zero_grad` calls."""


def gradient_bytes(parameter: Tensor) -> int:
    """Bytes of a parameter's gradient; 0 without a gradient, and for a used one."""
    gradient = parameter.grad
    return 0 if gradient is None or isinstance(gradient, UsedGradient) else gradient.nbytes


class StepInBackward:
    """Takes the optimizers' steps for one model's parameters in the backward pass, from `open` to `close`.

    Graphs name it by its `number`, and a parameter by its index in `parameters`.
    """

    def __init__(self, optimizers: Iterable[Optimizer], model: nn.Module, *, within_parameters: bool) -> None:
        self.optimizers = list(optimizers)
        self.within_parameters = within_parameters
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
        self._settings: dict[int, list[dict[str, Any]]] = {}
        """the settings that the backward pass used, by optimizer whose `step()` has not run yet"""
        self._used: dict[int, list[tuple[Tensor, UsedGradient]]] = {}
        self._hooks: list[Any] = []
        self._release_scalers: Callable[[], object] = lambda: None

    def open(self) -> None:
        """Let `optimizer.step()` of the user's loop find nothing to do."""
        self._refuse_hooks()
        _OPEN[self.number] = self
        for optimizer in self.optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))
        self._release_scalers()
        self._release_scalers = _REFUSED_SCALERS.hold(self)

    def close(self) -> None:
        _OPEN.pop(self.number, None)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._clear()
        self._release_scalers()

    def begin(self) -> None:
        """Refuse a backward pass that would not give eager's parameters."""
        if graph_is_kept():
            raise Unsupported(
                f"backward(retain_graph=True) would run again with parameters that change now: {LEAVE_OUT}"
            )
        if self._settings:
            raise Unsupported(
                "a second backward pass before optimizer.step(), as in gradient accumulation: its gradients "
                "must be summed before the parameters change. Call optimizer.step() after each, or "
                + LEAVE_OUT
            )
        present = [n for n, p in zip(self.names, self.parameters, strict=True) if not _is_zero(p.grad)]
        if present:
            raise Unsupported(
                f"'{present[0]}' has a gradient before the backward pass, to which this one would be added: "
                f"call zero_grad() first, or {LEAVE_OUT}"
            )
        self._refuse_hooks()
        self._clear()
        self._settings = {id(optimizer): _settings_of(optimizer) for optimizer in self.optimizers}

    def update(self, index: int, gradient: Tensor) -> None:
        """Take the step of one parameter and mark its gradient as used."""
        parameter = self.parameters[index]
        if gradient.stride() != parameter.stride():
            # autograd's strides for `.grad`
            gradient = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
        parameter.grad = gradient
        try:
            take_step(self.owner[id(parameter)], [parameter], within_parameters=self.within_parameters)
        finally:
            parameter.grad = UsedGradient.of(parameter)

    def abort(self) -> None:
        """Clean up after a backward pass that failed or was interrupted; its updates stay."""
        taken = sum(isinstance(parameter.grad, UsedGradient) for parameter in self.parameters)
        self._clear()
        if taken:
            logger.warning(
                "the backward pass ended early, when %d of %d parameters had been updated in it: load your "
                "last checkpoint before you go on",
                taken,
                len(self.parameters),
            )

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Arguments | None:
        """Run a closure, which calls backward; refuse a step that differs from the steps taken in backward;
        hide used gradients."""
        arguments = run_closure(args, kwargs) if has_arguments(args, kwargs) else (args, kwargs)
        if arguments is None:
            raise Unsupported(
                "optimizer.step(closure) runs a backward pass inside of a step that is not torch's own: call "
                f"it without a closure, or {LEAVE_OUT}"
            )
        own = [p for group in optimizer.param_groups for p in group["params"]]
        used = [(p, p.grad) for p in own if isinstance(p.grad, UsedGradient)]
        found = self._settings.pop(id(optimizer), None)
        if found is None and any(not gradient.is_zero for _, gradient in used):
            raise Unsupported(
                "optimizer.step() a second time with the gradients of one backward pass, which has used "
                f"them: call zero_grad() between two steps, or {LEAVE_OUT}"
            )
        changed = [] if found is None else _changed(found, _settings_of(optimizer))
        if changed:
            raise Unsupported(
                f"'{changed[0]}' of the optimizer changed between backward() and optimizer.step(), and the "
                f"backward pass has used the old one: change it before backward(), or {LEAVE_OUT}"
            )
        self._used[id(optimizer)] = used
        for parameter, _ in used:
            parameter.grad = None
        return arguments

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        for parameter, gradient in self._used.pop(id(optimizer), ()):
            parameter.grad = gradient

    def _clear(self) -> None:
        self._settings = {}
        for parameter in self.parameters:
            if isinstance(parameter.grad, UsedGradient):
                parameter.grad = None

    def _refuse_hooks(self) -> None:
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if _has_hooks(parameter):
                raise Unsupported(
                    f"'{name}' has a hook that waits for its gradient, which the step in backward uses up: "
                    f"remove the hook, or {LEAVE_OUT}"
                )


def _is_zero(gradient: Tensor | None) -> bool:
    """Whether a sum with this gradient is the other summand."""
    return gradient is None or (isinstance(gradient, UsedGradient) and gradient.is_zero)


def _settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The present learning rate and other settings of every group."""
    return [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def _changed(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[str]:
    """The names of the settings that differ."""
    pairs = zip(before, now, strict=False)
    return [name for old, new in pairs for name in new if name in old and not same(old[name], new[name])]


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


def update_parameter(number: int, index: int, gradient: Tensor) -> None:
    """An op of backward graphs: take the step of one parameter."""
    _OPEN[number].update(index, gradient)


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
    stack = [leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if id(getattr(node, "variable", None)) in own:
            return True
        following = [n for n, _ in node.next_functions if n is not None and n not in seen]
        seen.update(following)
        stack += following
    return False
