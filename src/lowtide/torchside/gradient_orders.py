"""Trace backward passes for gradients laid out as they will come.

AOTAutograd traces a backward pass before it knows the gradients: it takes each to be laid out like the output
that it belongs to, and copies it into that layout where it is not. Eager PyTorch goes on with the gradient as
it is, and some kernels sum in another order then.
"""

import contextlib
import unittest.mock
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._functorch._aot_autograd import collect_metadata_analysis

Orders = Mapping[str, str]
"""The order of an output's dimensions in memory, outermost first, and that of its gradient: "0231" and "0123"
for an image in channels last whose gradient is not."""


def order_of(tensor: torch.Tensor) -> str:
    strides = tensor.stride()
    return "".join(map(str, sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))))


def in_another_order(shape: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two tensors of one shape are laid out in another order of their dimensions. A gradient that was
    expanded has the same number everywhere, in any order."""
    dims = [dim for dim, size in enumerate(shape) if size > 1 and strides[dim] and others[dim]]
    return sorted(dims, key=lambda dim: -strides[dim]) != sorted(dims, key=lambda dim: -others[dim])


@contextlib.contextmanager
def gradients_in(orders: Orders) -> Iterator[None]:
    """Trace graphs for gradients in these orders."""
    torchs = collect_metadata_analysis.coerce_tangent_and_suggest_memory_format

    def coerced(output: torch.Tensor) -> tuple[Any, Any, bool]:
        tangent, memory_format, is_updated = torchs(output)
        order = orders.get(order_of(tangent)) if _is_plain(tangent) else None
        if order is None:
            return tangent, memory_format, is_updated
        return _arranged(tangent, order), memory_format, True

    if not orders:
        yield
        return
    name = "coerce_tangent_and_suggest_memory_format"
    with unittest.mock.patch.object(collect_metadata_analysis, name, coerced):
        yield


def _is_plain(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.dim() > 1


def _arranged(tensor: torch.Tensor, order: str) -> torch.Tensor:
    """A dense tensor of the same shape, in another order."""
    dims = list(map(int, order))
    back = [dims.index(dim) for dim in range(len(dims))]
    return tensor.permute(dims).contiguous().permute(back)
