"""A gradient that leaves a graph as the terms of a sum, which autograd then adds up itself.

Let autograd add up what a graph gives for one input as several gradients (see `capture.sums`).

The input passes through a fan on its way into the graph: a node of autograd with as many edges to what made
the input as its gradient has terms.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch


def terms(*gradients: torch.Tensor) -> torch.Tensor:
    """An op of backward graphs: one tensor that carries all `gradients` to where they are added up."""
    carrier: Any = gradients[0].detach()
    carrier.lowtide_terms = gradients
    return carrier  # type: ignore[no-any-return]


def taken_apart(carrier: Any) -> tuple[torch.Tensor, ...]:
    """The gradients that `terms` was given, or the one that no such op has seen. Only once: autograd would
    copy what is known elsewhere."""
    gradients: tuple[torch.Tensor, ...] | None = getattr(carrier, "lowtide_terms", None)
    if gradients is None:
        return (carrier,)
    del carrier.lowtide_terms
    return gradients


class _GradientTerms(torch.autograd.Function):
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


def with_gradient_terms(function: Callable[..., Any], fans: Mapping[int, int]) -> Callable[..., Any]:
    """`function`, a compiled graph, called with some inputs behind fans; each with its number of terms."""

    def call(*args: Any) -> Any:
        values = list(args)
        for place, number in fans.items():
            values[place] = _GradientTerms.apply(*[args[place]] * number)  # type: ignore[no-untyped-call]
        del args
        return function(*values)

    return call
