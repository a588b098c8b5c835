"""Ops for which torch must know a number before it can trace them, though any would do.

The gradients of `pow` and `lerp` compute with the number in C, and a dropout takes its probability as a
`float` of C. Here they are traced with numbers that an input of the graph decides: see `numbers`.
"""

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lowtide.torchside import hooks
from lowtide.torchside.calls import is_number
from lowtide.torchside.ops.dropout import dropout_by_number, dropout_by_number_backward

aten = torch.ops.aten


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, probability: Any) -> Tensor:
        with hooks.below_autograd():
            result, mask = dropout_by_number(value, probability)
        ctx.save_for_backward(mask)
        ctx.probability = probability
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return dropout_by_number_backward(grad, *ctx.saved_tensors, ctx.probability), None


class _Power(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, exponent: Any) -> Tensor:
        ctx.save_for_backward(value)
        ctx.exponent = exponent
        with hooks.below_autograd():
            return aten.pow.Tensor_Scalar(value, exponent)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (value,), exponent = ctx.saved_tensors, torch.sym_float(ctx.exponent)  # type: ignore[no-untyped-call]
        if exponent == 0:
            return torch.zeros_like(value, memory_format=torch.contiguous_format), None
        return grad * aten.mul.Scalar(aten.pow.Tensor_Scalar(value, exponent - 1), exponent), None


class _Lerp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, start: Tensor, end: Tensor, weight: Any) -> Tensor:
        ctx.weight = weight
        with hooks.below_autograd():
            return aten.lerp.Scalar(start, end, weight)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight = torch.sym_float(ctx.weight)  # type: ignore[no-untyped-call]
        return aten.mul.Scalar(grad, 1 - weight), aten.mul.Scalar(grad, weight), None


def _traced(function: type[torch.autograd.Function], op: Any) -> Callable[..., Any]:
    def trace(*args: Any, **named: Any) -> Any:
        every = (*args, *named.values())
        if is_number(every[-1]) and every[0].is_floating_point():
            return function.apply(*every)  # type: ignore[no-untyped-call]
        return op._op_dk(torch._C.DispatchKey.Autograd, *args, **named)

    return lambda _torchs: trace


def ways_to_trace() -> dict[hooks.OpOverload[..., Any], Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """For each of eager's ops, from torch's way to trace it to ours."""
    ops = {aten.pow.Tensor_Scalar: _Power, aten.lerp.Scalar: _Lerp}
    return {op: _traced(function, op) for op, function in ops.items()}


@contextlib.contextmanager
def dropouts_by_number() -> Iterator[None]:
    """Trace dropouts on CPU whose probability is an input of the graph: `torch.nn.functional` finds here what
    is not written in Python."""
    plain = torch.dropout

    def dropout(value: Tensor, probability: Any, train: bool) -> Tensor:
        if is_number(probability) and train and value.device.type == "cpu" and probability != 0:
            return _Dropout.apply(value, probability)  # type: ignore[no-untyped-call, no-any-return]
        return plain(value, probability, train)

    with unittest.mock.patch.object(torch._VF, "dropout", dropout, create=True):
        yield
