"""Ops that eager differentiates by looking at values.

The gradient of a product without zeros is the product divided by each factor; that of a value which fills a
mask is the sum of what the mask selects. On fake tensors torch cannot look, and takes a way for all values
that rounds otherwise. Here the backward op runs eager's own op again under autograd.

Shortcomings: not for `masked_fill_`, which works in place.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowtide.torchside import hooks
from lowtide.torchside.calls import storage_key

aten = torch.ops.aten

OPS = {
    "product": aten.prod.default,
    "product_of_dim": aten.prod.dim_int,
    "masked_fill": aten.masked_fill.Tensor,
}


@torch.library.custom_op("lowtide::gradients_by_value", mutates_args=())
def gradients_by_value(  # noqa: PLR0917 - an op has no keywords
    name: str,
    grad: torch.Tensor,
    tensors: list[torch.Tensor],
    wanted: list[bool],
    numbers: list[int],
    dtype: torch.dtype | None,
) -> list[torch.Tensor]:
    """Those gradients of the `tensors` of one of `OPS` that are `wanted`; `numbers` and `dtype` are the rest
    of its arguments."""
    with hooks.recording():
        inputs = [t.detach().requires_grad_(needed) for t, needed in zip(tensors, wanted, strict=True)]
        result = _run(name, inputs, numbers, dtype)
        leaves = [leaf for leaf, needed in zip(inputs, wanted, strict=True) if needed]
    found = torch.autograd.grad(result, leaves, grad)
    return [one.clone() if storage_key(one) == storage_key(grad) else one for one in found]


@gradients_by_value.register_fake
def _fake_gradients(  # noqa: PLR0917 - an op has no keywords
    name: str,
    grad: torch.Tensor,
    tensors: list[torch.Tensor],
    wanted: list[bool],
    numbers: list[int],
    dtype: torch.dtype | None,
) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for tensor, needed in zip(tensors, wanted, strict=True) if needed]


class _ByValue(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str, numbers: list[int], dtype: torch.dtype | None, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.name, ctx.rest = name, (numbers, dtype)
        with hooks.below_autograd():
            return _run(name, tensors, numbers, dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        tensors, wanted = list(ctx.saved_tensors), list(ctx.needs_input_grad[3:])
        found = iter(gradients_by_value(ctx.name, grad, tensors, wanted, *ctx.rest))
        return (None, None, None, *(next(found) if needed else None for needed in wanted))


def _run(
    name: str, tensors: Sequence[torch.Tensor], numbers: Sequence[int], dtype: torch.dtype | None
) -> torch.Tensor:
    options = {} if dtype is None else {"dtype": dtype}
    result: torch.Tensor = OPS[name](*tensors, *numbers, **options)
    return result


def _traced(name: str) -> Callable[..., Any]:
    def trace(*args: Any, dtype: torch.dtype | None = None, **named: Any) -> Any:
        every = (*args, *named.values())
        tensors = [arg for arg in every if isinstance(arg, torch.Tensor)]
        numbers = [int(arg) for arg in every if not isinstance(arg, torch.Tensor)]
        return _ByValue.apply(name, numbers, dtype, *tensors)  # type: ignore[no-untyped-call]

    return lambda _torchs: trace


def ways_to_trace() -> dict[hooks.OpOverload[..., Any], Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """For each of eager's ops, from torch's way to trace it to ours."""
    return {op: _traced(name) for name, op in OPS.items()}
