"""The tensors that Python's objects keep live in this process, and its optimizers."""

import contextlib
import gc
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lowtide.torch_compat.dispatch import FakeTensor, has_storage


def python_tensors(device: torch.device, *, young: bool = False) -> list[Tensor]:
    """Those with memory on `device`. Garbage in cycles is among them until it is collected.

    `young`: at least those that were made since `collections` changed, and hardly any others. To find all
    takes a tenth of a second, where many libraries are imported.
    """
    # the type alone: an object's __class__, and the hash of a type, may be code of the user's
    kinds = {id(kind) for kind in _kinds(Tensor)}
    values = gc.get_objects(0) + gc.get_objects(1) if young else gc.get_objects()
    found = [value for value in values if id(type(value)) in kinds]
    with torch._C.DisableTorchFunctionSubclass():
        return [each for each in found if _is_plain(each) and each.device == device and has_storage(each)]


def python_optimizers() -> list[Optimizer]:
    """All optimizers of the process, found in a tenth of a second where many libraries are imported."""
    kinds = {id(kind) for kind in _kinds(Optimizer)}
    return [value for value in gc.get_objects() if id(type(value)) in kinds]


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has memory at all: no parameter without a shape, no value inside of torch.func, and no
    tensor of a class that has a shape and nothing else."""
    if is_lazy(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return type(tensor) in (Tensor, torch.nn.Parameter) or _has_data(tensor)


def _has_data(tensor: Tensor) -> bool:
    try:
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def gradient_of(tensor: Tensor) -> Tensor | None:
    """The `.grad` of a leaf; None for other tensors."""
    with torch._C.DisableTorchFunctionSubclass(), contextlib.suppress(RuntimeError):
        # torch refuses to look at some views that were changed in place
        return tensor.grad if tensor.is_leaf else None
    return None


def collections() -> tuple[int, ...]:
    """How often garbage was collected so that objects became old."""
    return tuple(int(stats["collections"]) for stats in gc.get_stats()[1:])


def _kinds(kind: type) -> Iterator[type]:
    """A class and all that come from it, without fake tensors."""
    if kind is not FakeTensor:
        yield kind
        below: list[type] = type.__subclasses__(kind)
        for each in below:
            yield from _kinds(each)
