"""The bytes and flops of a call, from a run on fake tensors; and a smaller call of the same op.

`work_of` counts bytes and flops. `shrink` makes a call that fits into less memory, for ops that are too large
to run whole: one size is reduced wherever it occurs, in shapes and in integer arguments; or every list of one
length is thinned out, as for foreach ops. A fake run tells which reductions make sense:

    mm(float[8192, 128], float[128, 256])   size 8192 by 16:   mm(float[512, 128], float[128, 256])

Shortcomings: `shrink` does not find a size that only occurs inside a product (a flattened batch).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import ceil, log
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lowtide.ops.calls import Call, signature, storages_bytes
from lowtide.ops.recurrent_stack import bytes_behind
from lowtide.ops.schema import may_have_flops
from lowtide.profiling.samples import make_sample
from lowtide.torch_compat.dispatch import (
    FakeTensorMode,
    grouped_products_of_any_type,
    iter_tensors,
    map_leaves,
    storage_key,
)
from lowtide.torch_compat.dynamo import unlogged

_MOST_REDUCTIONS = 3
_SMALLEST_SIZE_ARGUMENT = 16
"""A smaller integer argument is more likely a dimension, a stride or a count than a size."""


class _NoModules:
    """Replaces torch's tracker of modules. Its hooks are on all modules of the process: another thread that
    traces meanwhile would have them in its graph."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def flop_counter() -> FlopCounterMode:
    """A counter of all flops in its block, and not by module."""
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    return counter


@dataclass(frozen=True, slots=True)
class Work:
    """`flops` is 0 where torch has no formula, as for an op that only moves bytes."""

    flops: int
    input_bytes: int
    outputs: tuple[int, ...]
    """Bytes of each fresh storage in the result."""

    @property
    def output_bytes(self) -> int:
        return sum(self.outputs)

    @property
    def nbytes(self) -> int:
        return self.input_bytes + self.output_bytes

    def ratio_to(self, other: "Work") -> float:
        """The ratio of times: by flops where both have flops, else by bytes."""
        if self.flops and other.flops:
            return self.flops / other.flops
        return self.nbytes / other.nbytes if other.nbytes else 1.0


_MOST_KNOWN = 1 << 14
_KNOWN: dict[tuple[object, str], Work] = {}


def work_of(call: Call) -> Work:
    """Bytes and flops of a call; raises the error of the op for invalid arguments."""
    # two functions can have the same name
    key = (call.target, signature(call))
    if key not in _KNOWN:
        work = _work_of(call)
        while len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.pop(next(iter(_KNOWN)), None)
        _KNOWN[key] = work
    return _KNOWN[key]


def visible_work_of(call: Call) -> Work:
    """As `work_of`; for an op that cannot run on fake tensors, the inputs alone."""
    try:
        return work_of(call)
    except Exception:
        return Work(flops=0, input_bytes=storages_bytes(call.tensors), outputs=())


def work_making(call: Call, made: tuple[int, ...]) -> Work:
    """As `visible_work_of`, for a call that makes storages of these bytes: only ops with flops need a fake
    run then."""
    if may_have_flops(call.target):
        return visible_work_of(call)
    return Work(flops=0, input_bytes=storages_bytes(call.tensors), outputs=made)


def _work_of(call: Call) -> Work:
    if call.target is torch.ops.aten.convolution_backward.default:
        _check_gradient(call)
    with flop_counter() as counter, _faked():
        args, kwargs = make_sample(call, fill=False)
        result = call.target(*args, **kwargs)
        return Work(
            flops=counter.get_total_flops(),
            input_bytes=storages_bytes(call.tensors),
            outputs=fresh_storages(result, (args, kwargs)),
        )


def _check_gradient(call: Call) -> None:
    """Compare the shapes of gradient and result: a fake run of a convolution's backward op does not."""
    gradient, image, weight, _, *how, _ = call.args
    result = fake_result(Call(torch.ops.aten.convolution.default, (image, weight, None, *how)))
    if result.shape != gradient.shape:
        raise ValueError(f"a gradient of {tuple(gradient.shape)} for a result of {tuple(result.shape)}")


def fake_result(call: Call) -> Any:
    """The result of the call on fake tensors."""
    with _faked():
        args, kwargs = make_sample(call, fill=False)
        return call.target(*args, **kwargs)


@contextmanager
def _faked() -> Iterator[None]:
    with unlogged(), torch.no_grad(), grouped_products_of_any_type(), FakeTensorMode():
        yield


def fresh_storages(result: object, inputs: object) -> tuple[int, ...]:
    """Bytes of each storage in `result` that is not among those of `inputs`, in order; with bytes that it
    keeps live beside it."""
    old = {storage_key(tensor) for tensor in iter_tensors(inputs)}
    new = {storage_key(tensor): bytes_behind(tensor) for tensor in iter_tensors(result)}
    return tuple(nbytes for key, nbytes in new.items() if key not in old)


def fake_tensor(shape: list[int], stride: list[int], like: Tensor) -> Tensor:
    """A tensor without memory, with the dtype and the device of `like`."""
    with FakeTensorMode():
        return torch.empty_strided(shape, stride, dtype=like.dtype, device=like.device)


@dataclass(frozen=True, slots=True)
class SmallerCall:
    """A call, its work, and the reductions that made it (`size 64`, `list 12`)."""

    call: Call
    work: Work
    reduced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Reduction:
    """`apply(call, parts)` divides `whole`, a size or a length of lists, by `parts`, rounded up."""

    name: str
    whole: int
    apply: Callable[[Call, int], Call | None]


def shrink(call: Call, work: Work, *, limit_bytes: int) -> SmallerCall | None:
    """A smaller call of the same op with at most `limit_bytes` of inputs and outputs; None if there is none.

    Of the reductions that fit, take the one whose flops shrink most nearly in proportion, as a batch does;
    then the first dimension of the largest tensor. Where no reduction is enough, reduce the farthest-reaching
    one further by another.
    """
    current = SmallerCall(call, work)
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
        # a factory has its sizes only here
        if isinstance(arg, (list, tuple)) and all(type(size) is int for size in arg):
            sizes += [size for size in arg if size >= _SMALLEST_SIZE_ARGUMENT]
    for size in dict.fromkeys(sizes):
        first = partial(_with_smaller_size, size=size, only_first=True)
        if _is_first_and_more(size, tensors) and _makes_sense(first(call, 2)):
            # batch size and image height are equal: a fake run cannot tell them apart
            yield _Reduction(f"first size {size}", size, first)
        else:
            yield _Reduction(f"size {size}", size, partial(_with_smaller_size, size=size))
    for length in sorted({len(arg) for arg in _lists(call)}, reverse=True):
        yield _Reduction(f"list {length}", length, partial(_with_shorter_lists, length=length))


def _is_first_and_more(size: int, tensors: list[Tensor]) -> bool:
    """Whether the largest tensor begins with a size that is also another dimension."""
    is_first = bool(tensors) and tensors[0].shape[:1] == (size,)
    return is_first and any(size in tensor.shape[1:] for tensor in tensors)


def _makes_sense(call: Call | None) -> bool:
    try:
        return call is not None and work_of(call) is not None
    except Exception:
        return False


def _least(
    start: SmallerCall, reduction: _Reduction, *, limit_bytes: int
) -> tuple[SmallerCall, float] | None:
    """`start` reduced by the smallest power of two that fits, or as far as possible.

    The number is the distance of the flops from shrinking in proportion; 0 is exact.
    """
    best: tuple[SmallerCall, float] | None = None
    parts = 2
    while (smaller := reduction.apply(start.call, parts)) is not None:
        try:
            work = work_of(smaller)
        except Exception:
            # an op may raise any error for invalid arguments: this size cannot be reduced alone
            return best
        if best is not None and work.nbytes >= best[0].work.nbytes:
            return best
        ratio = reduction.whole / ceil(reduction.whole / parts)
        distance = abs(log(start.work.flops / work.flops / ratio)) if work.flops and start.work.flops else 0.0
        best = SmallerCall(smaller, work, (*start.reduced, reduction.name)), round(distance, 1)
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
        # a regular subset, so that the remaining sizes are as mixed as before
        return value[::parts] if isinstance(value, list) and len(value) == length else value

    args = tuple(shorter(arg) for arg in call.args)
    return Call(call.target, args, {key: shorter(arg) for key, arg in call.kwargs.items()})
