"""What autograd's engine is doing right now."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch


def nodes_after_this() -> list[Any]:
    """Asked from inside of a backward pass: the nodes that get the gradients of the one that runs."""
    return [node for node, _ in torch._C._current_autograd_node().next_functions]


def graph_is_kept() -> bool:
    """Asked from inside of a backward pass: whether another one may follow (`retain_graph`, say)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def autocast_is_on() -> bool:
    return bool(torch._C._is_any_autocast_enabled())


def autocast_off() -> AbstractContextManager[None]:
    """Cast nothing, on any device."""
    switch: AbstractContextManager[None] = torch._C._DisableAutocast()
    return switch


def around_backward(context: Callable[[], AbstractContextManager[None]]) -> None:
    """Run every backward pass of this process inside of a `context()`, from now on.

    What autograd raises after its last node, as DistributedDataParallel's sums do, passes no other code.
    """
    plain = torch.autograd.backward

    @functools.wraps(plain)
    def backward(*args: Any, **kwargs: Any) -> None:
        with context():
            plain(*args, **kwargs)

    torch.autograd.backward = torch.compiler.disable(backward)  # type: ignore[no-untyped-call]
