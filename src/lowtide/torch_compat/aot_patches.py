"""Checks that an op of linear algebra went well, traced as the ops they are.

torch keeps `_linalg_check_errors`, which returns nothing and raises for a singular matrix, in its order by a
token, and that is one input and one output more than the model has. Our graphs keep the order of their ops
anyway, so that a check stays where it stands as long as it is not taken for dead code.

Graphs that are not written out as text while torch compiles them.

torch writes out every one, also where nobody gets to see it: a large one takes a second.

Trace backward passes for gradients laid out as they will come.

AOTAutograd traces a backward pass before it knows the gradients: it takes each to be laid out like the output
that it belongs to, and copies it into that layout where it is not. Eager PyTorch goes on with the gradient as
it is, and some kernels sum in another order then.
"""

import contextlib
import os
import threading
import unittest.mock
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd import collect_metadata_analysis
from torch.fx.node import has_side_effect

NAME = "aten::_linalg_check_errors"


@contextlib.contextmanager
def traced_without_tokens() -> Iterator[None]:
    """Trace checks as ops of the graph, which are never dropped."""
    has_side_effect(torch.ops.aten._linalg_check_errors.default)
    holder = torch._library.simple_registry.singleton.find(NAME).effect
    effect = holder.effect
    holder.register(None)
    try:
        yield
    finally:
        holder.register(effect)


ASKED = "TORCH_TRACE"
"""The variable of the environment that asks for the text."""


@contextlib.contextmanager
def unprinted() -> Iterator[None]:
    """Let this thread write no graph out, unless the user asked torch for a record of what it compiles."""
    if ASKED in os.environ:
        yield
        return
    thread, torchs = threading.get_ident(), fx.GraphModule.print_readable

    def write(module: fx.GraphModule, *args: Any, **kwargs: Any) -> str:
        text: str = "" if threading.get_ident() == thread else torchs(module, *args, **kwargs)
        return text

    with unittest.mock.patch.object(fx.GraphModule, "print_readable", write):
        yield


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
