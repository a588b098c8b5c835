"""Count flops without a trace in other threads.

How much work a call is, without doing it: bytes and flops from a run on fake tensors.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lowtide.ops.calls import Call, signature, storages_bytes
from lowtide.ops.schema import may_have_flops
from lowtide.profiling.samples import make_sample
from lowtide.torch_compat.dispatch import (
    FakeTensorMode,
    grouped_products_of_any_type,
    iter_tensors,
    storage_key,
)
from lowtide.torch_compat.dynamo import unlogged


class _NoModules:
    """Stands for torch's tracker of modules, whose hooks are on all modules of the process: what another
    thread traces meanwhile would have them in its graph."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def flop_counter() -> FlopCounterMode:
    """A counter of all flops inside; not of each module's."""
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    return counter


@dataclass(frozen=True, slots=True)
class Work:
    """`flops` is 0 where torch has no formula, as for everything that only moves bytes."""

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
        """How many times as long as `other` this takes: by flops where both have them, else by bytes."""
        if self.flops and other.flops:
            return self.flops / other.flops
        return self.nbytes / other.nbytes if other.nbytes else 1.0


_KNOWN: dict[tuple[object, str], Work] = {}


def work_of(call: Call) -> Work:
    """Bytes and flops of a call; raises what the op raises when its arguments do not fit together."""
    # Two functions can have one name.
    key = (call.target, signature(call))
    if key not in _KNOWN:
        _KNOWN[key] = _work_of(call)
    return _KNOWN[key]


def visible_work_of(call: Call) -> Work:
    """As `work_of`; of an op that cannot run on fake tensors, the inputs alone."""
    try:
        return work_of(call)
    except Exception:
        return Work(flops=0, input_bytes=storages_bytes(call.tensors), outputs=())


def work_making(call: Call, made: tuple[int, ...]) -> Work:
    """As `visible_work_of`, for a call that is known to make blocks of these bytes: only what has flops
    needs a fake run then."""
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
    """A fake run of a convolution's backward op does not ask whether the gradient is one of its result."""
    gradient, image, weight, _, *how, _ = call.args
    result = fake_result(Call(torch.ops.aten.convolution.default, (image, weight, None, *how)))
    if result.shape != gradient.shape:
        raise ValueError(f"a gradient of {tuple(gradient.shape)} for a result of {tuple(result.shape)}")


def fake_result(call: Call) -> Any:
    """What the call gives on fake tensors."""
    with _faked():
        args, kwargs = make_sample(call, fill=False)
        return call.target(*args, **kwargs)


@contextmanager
def _faked() -> Iterator[None]:
    with unlogged(), torch.no_grad(), grouped_products_of_any_type(), FakeTensorMode():
        yield


def fresh_storages(result: object, inputs: object) -> tuple[int, ...]:
    """Bytes of each storage in `result` that is not among those of `inputs`, in order."""
    old = {storage_key(tensor) for tensor in iter_tensors(inputs)}
    new = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in iter_tensors(result)}
    return tuple(nbytes for key, nbytes in new.items() if key not in old)


def fake_tensor(shape: list[int], stride: list[int], like: Tensor) -> Tensor:
    """A tensor without memory, with the dtype and the device of `like`."""
    with FakeTensorMode():
        return torch.empty_strided(shape, stride, dtype=like.dtype, device=like.device)
