"""What stands for a gradient and for a parameter between the step in backward and `optimizer.step()`.

In eager PyTorch, the parameters are still the old ones there, and the gradients exist:

    loss.backward()       the step in backward has updated the parameters and freed their gradients
    p.mul_(0.9)           refused, as is every other read or change of a parameter
    p.grad.norm()         refused, until `zero_grad`
    optimizer.step()      the parameters can be read and changed again

Shortcoming: a tensor that shares a parameter's memory (`p.data`, a view) and was made before cannot be
watched for reads. Changes of it are noticed at `optimizer.step()`, but for those of `p.data`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.errors import Unsupported
from lowtide.torch_compat.dispatch import iter_tensors, tensor_without_memory, torch_function_off

LEAVE_OUT = "leave step_in_backward out"

GUARD = "_lowtide_guard"
"""The attribute of an updated parameter for its `_Guard`."""


class _Guard(NamedTuple):
    """The name of an updated parameter; `refused` is called when a read or change of it is refused, and
    `replaced` when all of its values were."""

    name: str
    refused: Callable[[], None]
    replaced: Callable[[], None]


def _nothing() -> None:
    return None


class UsedGradient(Tensor):
    """Replaces a gradient that the step in backward has used; has no memory and cannot be read.

    Like a gradient, it stays after `optimizer.step()` until `zero_grad` removes it or makes it zero.
    """

    is_zero = False
    refused: Callable[[], None] = staticmethod(_nothing)
    """called when a read is refused"""

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
        if name in LAYOUT or name in ("__get__", "__set__"):
            with torch_function_off():
                return func(*args, **(kwargs or {}))
        if name in ZEROING:
            for gradient in args[0] if isinstance(args[0], (list, tuple)) else [args[0]]:
                if isinstance(gradient, UsedGradient) and "zero" in name:
                    gradient.is_zero = True
            return args[0]
        if name == "_has_compatible_shallow_copy_type":
            return False  # else `module.to(...)` would assign data to this gradient
        if name in MOVING or name == _accelerator():
            own = args[0]
            like = func(torch.empty(0, dtype=own.dtype, device=own.device), *args[1:], **(kwargs or {}))
            moved = UsedGradient.of(own, like)
            moved.is_zero, moved.refused = own.is_zero, own.refused
            return moved
        for gradient in iter_tensors((args, kwargs)):
            if isinstance(gradient, UsedGradient):
                gradient.refused()
        raise Unsupported(
            f"{name}() reads a gradient that the step in backward uses up: for clipping by norm, "
            f"GradScaler, accumulation, or to look at gradients, {LEAVE_OUT}"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise Unsupported(f"{func} reads a gradient that the step in backward uses up: {LEAVE_OUT}")


LAYOUT = {"size", "dim", "stride", "numel", "is_complex", "is_floating_point"}
"""Functions that read no values."""
MOVING = {"to", "cpu", "float", "double", "half", "bfloat16"}
"""Functions behind `model.cpu()` and the like, which trainers call at the end; a device has one of its own
name (`model.cuda()`)."""
ZEROING = {"zero_", "_foreach_zero_", "detach_", "requires_grad_"}
"""Functions that `zero_grad` calls."""


def _accelerator() -> str:
    """The kind of accelerator that torch is built for or has registered; empty without one."""
    found = torch.accelerator.current_accelerator()
    return "" if found is None else found.type


def gradient_bytes(parameter: Tensor) -> int:
    """Bytes of a parameter's gradient; 0 without a gradient, and for a used one."""
    gradient = parameter.grad
    return 0 if gradient is None or isinstance(gradient, UsedGradient) else gradient.nbytes


def is_zero(gradient: Tensor | None) -> bool:
    """Whether a sum with this gradient is the other summand."""
    return gradient is None or (isinstance(gradient, UsedGradient) and gradient.is_zero)


class _Updated:
    """Refuses to read or change a parameter; the first base class of a class made by `_updated`."""

    def __repr__(self) -> str:
        return f"UpdatedParameter('{_guard_of(self).name}')"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        is_attribute = name in ("__get__", "__set__", "__delete__")
        if is_attribute:
            name = func.__self__.__name__
        if name not in VALUES if is_attribute else name in LAYOUT or name in PLAIN:
            with torch_function_off():
                return func(*args, **(kwargs or {}))
        own = next(tensor for tensor in iter_tensors((args, kwargs or {})) if isinstance(tensor, _Updated))
        found = _guard_of(own)
        if name == "copy_" and args[0] is own and not any(isinstance(each, _Updated) for each in args[1:]):
            # as `load_state_dict` does: which values were there before does not matter any more
            with torch_function_off():
                result = func(*args, **(kwargs or {}))
            found.replaced()
            return result
        found.refused()
        raise Unsupported(
            f"{name} reads or changes '{found.name}' between backward() and "
            "optimizer.step(), but the step in backward comes before: do it before backward() or after "
            f"optimizer.step(), or {LEAVE_OUT}"
        )


VALUES = {"data", "real", "imag", "T", "H", "mT", "mH"}
"""Attributes of a tensor that give access to its values."""
PLAIN = {
    *("__hash__", "__len__", "nelement", "element_size", "is_contiguous", "is_signed", "get_device"),
    *("storage_offset", "data_ptr", "untyped_storage", "_is_view", "requires_grad_", "register_hook"),
    *("register_post_accumulate_grad_hook", "is_shared", "is_pinned", "is_inference"),
}
"""More functions that read no values of a parameter."""


def guard(
    parameter: Tensor,
    name: str,
    *,
    refused: Callable[[], None] = _nothing,
    replaced: Callable[[], None] = _nothing,
) -> None:
    """Refuse reads and changes of an updated parameter until `unguard`, but for a copy of other values over
    all of it. The object stays the same."""
    vars(parameter)[GUARD] = _Guard(name, refused, replaced)
    parameter.__class__ = _updated(type(parameter))


def unguard(parameter: Tensor) -> None:
    if isinstance(parameter, _Updated):
        parameter.__class__ = type(parameter).__bases__[1]
        del vars(parameter)[GUARD]


def _guard_of(parameter: Any) -> _Guard:
    found: _Guard = vars(parameter)[GUARD]
    return found


@functools.cache
def _updated(kind: Any) -> Any:
    return type(kind)("UpdatedParameter", (_Updated, kind), {})
