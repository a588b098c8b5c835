"""How a model is called and what a step differentiates: the same for capture, measuring and verifying.

A `Loop` has the loss and the optimizers of the user's training loop.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lowtide.errors import CaptureError
from lowtide.optim.joined_optimizers import join_optimizers
from lowtide.torch_compat.modules import has_hooks_before_forward
from lowtide.trace.batch_arguments import refuse_other_arguments

Loss = Callable[[Any], torch.Tensor]


class Arguments(NamedTuple):
    """A batch of positional and keyword arguments at once, as in a call of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def split_batch(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a batch: a tensor, a tuple (or list), or a mapping."""
    if isinstance(batch, Arguments):
        return batch
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    if isinstance(batch, Mapping):
        return (), {str(key): batch[key] for key in batch}
    raise CaptureError(
        f"the batch is a {type(batch).__name__}: give a tensor, a tuple of positional arguments "
        "or a dict of keyword arguments"
    )


def call(model: nn.Module, batch: Any) -> Any:
    """`model` on a batch; a `CaptureError` for a batch that its forward does not take."""
    args, kwargs = split_batch(batch)
    try:
        return model(*args, **kwargs)
    except TypeError:
        refuse_other_arguments(model, args, kwargs)
        raise


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested dicts, lists, tuples and the attributes of plain objects, in their order."""
    return _tensors_in(value, set())


def _tensors_in(value: Any, inside: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    items = _parts(value)
    if items and id(value) not in inside:
        for item in items:
            yield from _tensors_in(item, inside | {id(value)})


def tensors_behind(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """As `tensors_in`, for objects of unknown size: each object is looked into once, in any order."""
    waiting, seen = list(values), set[int]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            waiting += _parts(value)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, tuple | list | set | deque):
        return list(value)
    if is_dataclass(value) and not isinstance(value, type):
        # only stored attributes: a property may raise
        own = getattr(value, "__dict__", None)
        names = [field.name for field in fields(value)]
        return [getattr(value, name) for name in names] if own is None else [own.get(name) for name in names]
    is_code = isinstance(value, type | nn.Module | ModuleType | FunctionType | MethodType)
    # a symbolic number refers to all of torch's tracing
    is_number = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
    return [] if is_code or is_number else list(getattr(value, "__dict__", {}).values())


def own_loss(output: Any) -> torch.Tensor | None:
    """The scalar that a model returns itself: `.loss`, `["loss"]` or a one-element output."""
    candidate = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if candidate is None and isinstance(output, torch.Tensor) and output.numel() == 1:
        candidate = output
    return candidate if isinstance(candidate, torch.Tensor) else None


class _Sum(torch.autograd.Function):
    """A sum whose gradient is in memory, as that of nearly every loss is; autograd's own is one number."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value)
        return value.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (value,) = ctx.saved_tensors
        return torch.ones_like(value).mul_(grad)


def sum_of_floats(output: Any, *, add_up: Callable[[Any], Any] = torch.sum) -> torch.Tensor:
    """The loss of a model without one, as it is traced: the sum of its floating outputs.

    Where such a step runs, the gradients of this loss are in memory (`loss_of`), and the facts of a step
    count them so: the user's own loss gives gradients in memory.
    """
    leaves = pytree.tree_leaves(output)
    sums = [add_up(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    if not sums:
        raise CaptureError("the model returns no floating tensor: pass `loss=` a function of its output")
    return torch.stack(sums).sum() if len(sums) > 1 else sums[0]


def loss_of(output: Any, loss: Loss | None = None) -> torch.Tensor:
    """The tensor to differentiate: `loss(output)`, else the model's own loss, else `sum_of_floats`."""
    if loss is not None:
        return loss(output)
    own = own_loss(output)
    return own if own is not None else sum_of_floats(output, add_up=_Sum.apply)


def entrance(model: nn.Module) -> list[Callable[..., Any]]:
    """The model's forward, if it is the first user code that a call runs; else empty."""
    forward = type(model).forward
    shared = any(type(module).forward is forward for module in model.modules() if module is not model)
    hooked = has_hooks_before_forward(model) or "forward" in vars(model)
    return [] if shared or hooked else [forward]


Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Loop:
    """The loss and the optimizers that a step was captured with, its tensors, and reserved bytes. References
    to optimizers and tensors are weak.

    `holds_outputs`: whether the model's outputs, besides the loss, stay live until the next forward pass
    ends. `origins`: parameters, buffers and tensors of the batch.
    """

    loss: Loss | None = None
    references: "tuple[weakref.ref[torch.optim.Optimizer], ...]" = ()
    holds_outputs: bool = True
    reserve_bytes: int = 0
    origins: "tuple[weakref.ref[torch.Tensor], ...]" = ()

    @classmethod
    def of(
        cls,
        optimizer: Optimizers | None,
        loss: Loss | None,
        *,
        holds_outputs: bool = True,
        reserve_bytes: int = 0,
        origins: Iterable[torch.Tensor] = (),
    ) -> Self:
        every = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer or ()
        return cls(
            loss,
            tuple(weakref.ref(each) for each in every),
            holds_outputs,
            reserve_bytes,
            tuple(weakref.ref(tensor) for tensor in origins),
        )

    @property
    def present_tensors(self) -> list[torch.Tensor]:
        """Tensors of the step that exist now: parameters, buffers, batch, gradients, optimizer state."""
        started = [tensor for reference in self.origins if (tensor := reference()) is not None]
        gradients = [tensor.grad for tensor in started if tensor.is_leaf and tensor.grad is not None]
        states = [each.state for reference in self.references if (each := reference()) is not None]
        return [*started, *gradients, *tensors_in([list(state.values()) for state in states])]

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """All optimizers as one; None without optimizers, or where one of them is freed."""
        alive = [each for reference in self.references if (each := reference()) is not None]
        return join_optimizers(alive) if len(alive) == len(self.references) else None
