"""Let autograd add up what a graph gives for one input as several gradients (see `capture.sums`).

The input passes through a fan on its way into the graph: a node of autograd with as many edges to what made
the input as its gradient has terms.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lowtide.torchside.ops.terms import taken_apart


class _Fan(torch.autograd.Function):
    """Gives an input on as it is."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, *_same: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return value

    @staticmethod
    def backward(ctx: Any, carrier: Any) -> Any:
        gradients = () if carrier is None else taken_apart(carrier)
        del carrier
        return (*gradients, *[None] * (len(ctx.needs_input_grad) - len(gradients)))


def fanned(function: Callable[..., Any], fans: Mapping[int, int]) -> Callable[..., Any]:
    """`function`, a compiled graph, called with some inputs behind fans; each with its number of terms."""

    def call(*args: Any) -> Any:
        values = list(args)
        for place, number in fans.items():
            values[place] = _Fan.apply(*[args[place]] * number)  # type: ignore[no-untyped-call]
        del args
        return function(*values)

    return call
