"""Autocast's memory of casts over several calls: eager casts a weight once in a block.

Each graph casts the weights that it reads itself. Where a block of autocast has several calls before a
backward pass, eager adds up their gradients in the type of the one cast that they share; graphs would add
them up in the weight's own. So a weight passes through a joint on its way into a graph: a node of autograd
that gives it on as it is. The joint of a later call hangs on that of the call before it, where autograd adds
the two gradients, and what arrives there is rounded as eager rounds it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lowtide.torch_compat import autograd_engine


class _Link:
    """What is known of a joint: the version of its weight, and whether that of a later call hangs on it."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.is_followed = False


class _Joint(torch.autograd.Function):
    """Gives a weight on as it is; rounds its gradient to `dtype` where that is the sum of several calls."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, link: _Link, dtype: torch.dtype) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.link, ctx.dtype = link, dtype
        return weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        if gradient is not None and ctx.link.is_followed:
            gradient = gradient.to(ctx.dtype).to(gradient.dtype)
        return gradient, None, None


class SharedCasts:
    """The weights that graphs have read since the current block of autocast began.

    `weight_changed` is told where one changed meanwhile, which eager's cache would not see.
    """

    def __init__(self, weight_changed: Callable[[], None]) -> None:
        self._weight_changed = weight_changed
        self._block: Any = None
        self._links: dict[int, tuple[_Link, torch.Tensor]] = {}

    def look(self, device: torch.device) -> None:
        """Forget the weights of a block that has ended."""
        block = autograd_engine.autocast_block(device)
        if block is None or block is not self._block:
            self._links.clear()
        self._block = block

    def join(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`weight`, as a graph that casts it to `dtype` is to read it."""
        link, source = _Link(autograd_engine.version_of(weight)), weight
        if id(weight) in self._links:
            before, read_before = self._links[id(weight)]
            if before.version == link.version:
                before.is_followed, source = True, read_before
            else:
                self._weight_changed()
        passed: torch.Tensor = _Joint.apply(source, link, dtype)  # type: ignore[no-untyped-call]
        if self._block is not None:
            self._links[id(weight)] = link, passed
        return passed


def joined(
    function: Callable[..., Any], casts: Mapping[int, torch.dtype], shared: SharedCasts
) -> Callable[..., Any]:
    """`function`, a compiled graph, called with weights behind joints, by the type that they are cast to."""

    def call(*args: Any) -> Any:
        values = list(args)
        del args
        if torch.is_grad_enabled():
            shared.look(values[next(iter(casts))].device)
            for place, dtype in casts.items():
                values[place] = shared.join(values[place], dtype)
        return function(*values)

    return call
