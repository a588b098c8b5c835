"""A smaller call of the same op, for ops that are too large to run whole.

One size is reduced wherever it occurs, in shapes and in integer arguments; or every list of one
length is thinned out, as for foreach ops. A run on fake tensors tells which reductions make sense.

Shortcomings: a size that only occurs inside a product (a flattened batch) is not found.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import ceil, log
from typing import Any

from torch import Tensor

from lowtide.ops.calls import Call
from lowtide.profiling.work import Work, fake_tensor, work_of
from lowtide.torch_compat.dispatch import map_leaves, storage_key

_MOST_REDUCTIONS = 3

# A smaller integer argument is more likely a dimension, a stride or a count than a size.
_SMALLEST_SIZE_ARGUMENT = 16


@dataclass(frozen=True, slots=True)
class Slice:
    """A smaller call, its work, and what was reduced to get there (`size 64`, `list 12`)."""

    call: Call
    work: Work
    reduced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Reduction:
    """`apply` leaves one of so many parts of `whole`, a size or a length of lists, rounded up."""

    name: str
    whole: int
    apply: Callable[[Call, int], Call | None]


def shrink(call: Call, work: Work, *, limit_bytes: int) -> Slice | None:
    """A slice of `call` with at most `limit_bytes` of inputs and outputs; None if there is none.

    Of the reductions that fit, the one is taken that makes the flops smaller most nearly in
    proportion, as a batch does; then the first dimension of the largest tensor. Where none
    is enough, the one that goes farthest is reduced further by another.
    """
    current = Slice(call, work)
    for _ in range(_MOST_REDUCTIONS):
        if current.work.nbytes <= limit_bytes:
            break
        found = []
        for reduction in _reductions(current.call):
            best = _least(current, reduction, limit_bytes=limit_bytes)
            if best is None:
                continue
            found.append(best)
            if best[0].work.nbytes <= limit_bytes and best[1] == 0:
                break
        if not found:
            return None
        fitting = [each for each in found if each[0].work.nbytes <= limit_bytes]
        if fitting:
            return min(fitting, key=lambda each: each[1])[0]
        current = min(found, key=lambda each: each[0].work.nbytes)[0]
    return current if current.work.nbytes <= limit_bytes else None


def _reductions(call: Call) -> Iterator[_Reduction]:
    """Every size of the call, those of its largest tensor first, then every length of a list."""
    tensors = sorted(call.tensors, key=lambda tensor: -tensor.numel())
    sizes = [int(size) for tensor in tensors for size in tensor.shape if size > 1]
    for arg in call.args:
        # A factory has its sizes here alone.
        if isinstance(arg, (list, tuple)) and all(type(size) is int for size in arg):
            sizes += [size for size in arg if size >= _SMALLEST_SIZE_ARGUMENT]
    for size in dict.fromkeys(sizes):
        first = partial(_with_smaller_size, size=size, only_first=True)
        if _is_first_and_more(size, tensors) and _makes_sense(first(call, 2)):
            # A batch as large as an image is high: a fake run does not tell one from the other.
            yield _Reduction(f"first size {size}", size, first)
        else:
            yield _Reduction(f"size {size}", size, partial(_with_smaller_size, size=size))
    for length in sorted({len(arg) for arg in _lists(call)}, reverse=True):
        yield _Reduction(f"list {length}", length, partial(_with_shorter_lists, length=length))


def _is_first_and_more(size: int, tensors: list[Tensor]) -> bool:
    """Whether the largest tensor begins with a size that also stands at another place."""
    is_first = bool(tensors) and tensors[0].shape[:1] == (size,)
    return is_first and any(size in tensor.shape[1:] for tensor in tensors)


def _makes_sense(call: Call | None) -> bool:
    try:
        return call is not None and work_of(call) is not None
    except Exception:
        return False


def _least(start: Slice, reduction: _Reduction, *, limit_bytes: int) -> tuple[Slice, float] | None:
    """`start` reduced by the smallest power of two that fits, or as far as it goes.

    With it, how far the flops are from having become smaller in proportion (0 is exactly so).
    """
    best: tuple[Slice, float] | None = None
    parts = 2
    while (smaller := reduction.apply(start.call, parts)) is not None:
        try:
            work = work_of(smaller)
        except Exception:
            # Whatever an op raises for arguments that do not fit: this size cannot be reduced alone.
            return best
        if best is not None and work.nbytes >= best[0].work.nbytes:
            return best
        ratio = reduction.whole / ceil(reduction.whole / parts)
        crooked = abs(log(start.work.flops / work.flops / ratio)) if work.flops and start.work.flops else 0.0
        best = Slice(smaller, work, (*start.reduced, reduction.name)), round(crooked, 1)
        if work.nbytes <= limit_bytes:
            return best
        parts *= 2
    return best


def _with_smaller_size(call: Call, parts: int, *, size: int, only_first: bool = False) -> Call | None:
    """The call with `size` reduced wherever it occurs, or as the first size of tensors alone."""
    smaller = ceil(size / parts)
    if smaller < 2:
        # Ops treat a size of 1 in ways of its own.
        return None
    made: dict[tuple[Any, ...], Tensor] = {}

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            shape = [
                smaller if each == size and (dim == 0 or not only_first) else int(each)
                for dim, each in enumerate(value.shape)
            ]
            # The same tensor given twice stays one; two views of a storage become two storages.
            key = (storage_key(value), value.storage_offset(), value.shape, value.stride(), value.dtype)
            if key not in made:
                made[key] = fake_tensor(shape, _smaller_strides(value, shape), value)
            return made[key]
        is_size = type(value) is int and value == size >= _SMALLEST_SIZE_ARGUMENT and not only_first
        return smaller if is_size else value

    args, kwargs = map_leaves(leaf, (call.args, call.kwargs))
    return Call(call.target, args, kwargs)


def _smaller_strides(tensor: Tensor, shape: list[int]) -> list[int]:
    """Strides for a smaller shape in the same order of dimensions, with the same gaps between them."""
    strides = [int(step) for step in tensor.stride()]
    order = sorted((dim for dim in range(len(shape)) if strides[dim]), key=lambda dim: (strides[dim], -dim))
    smaller = [0] * len(shape)
    for inner, dim in zip([None, *order], order, strict=False):
        if inner is None:
            smaller[dim] = strides[dim]
        else:
            gap = Fraction(strides[dim], strides[inner] * max(int(tensor.shape[inner]), 1))
            smaller[dim] = ceil(smaller[inner] * max(shape[inner], 1) * gap)
    return smaller


def _lists(call: Call) -> list[list[Tensor]]:
    """The list arguments that hold several tensors."""
    values = [*call.args, *call.kwargs.values()]
    return [v for v in values if isinstance(v, list) and len(v) > 1 and all(isinstance(t, Tensor) for t in v)]


def _with_shorter_lists(call: Call, parts: int, *, length: int) -> Call | None:
    if parts > length:
        return None

    def shorter(value: Any) -> Any:
        # Every so-manyth, so that the sizes that remain are as mixed as before.
        return value[::parts] if isinstance(value, list) and len(value) == length else value

    args = tuple(shorter(arg) for arg in call.args)
    return Call(call.target, args, {key: shorter(arg) for key, arg in call.kwargs.items()})
