"""What autograd's engine is doing right now.

Hooks of parameters stay silent where no gradient came.

A graph is one node of autograd with an edge to each of its parameters, also to those that the loss does not
reach this time. Eager has no such edge and calls none of their hooks; here autograd calls them with None.
"""

import functools
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


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


def autocast_block(device: torch.device) -> Any:
    """What stands for the block of autocast that is on: the same object as long as it remembers its casts.
    None where it casts nothing or remembers nothing."""
    if not torch.is_autocast_enabled(device.type) or not torch.is_autocast_cache_enabled():
        return None
    probe = _probe(device)
    with torch.enable_grad():
        made = torch.mm(probe, probe)
    assert made.grad_fn is not None
    return made.grad_fn.next_functions[0][0]


@functools.cache
def _probe(device: torch.device) -> torch.Tensor:
    """A leaf, as weights are: autocast remembers casts of no other tensors."""
    return torch.zeros(1, 1, device=device, requires_grad=True)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place."""
    return tensor._version


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


Hook = Callable[[Any], Any]


class _WithGradient:
    """A hook of a gradient."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def __call__(self, gradient: Tensor | None) -> Any:
        return None if gradient is None else self.hook(gradient)


class _AfterGradient:
    """A hook of a parameter whose gradient was added."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def __call__(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.hook(parameter)


def silence_hooks() -> None:
    """Called inside of a backward pass that gives some parameters no gradient: their hooks are not called.

    One that is called after a gradient was added still is where the parameter has one of an earlier pass.
    """
    for parameter in _parameters(nodes_after_this(), set()):
        _wrap(parameter._backward_hooks, _WithGradient)
        _wrap(getattr(parameter, "_post_accumulate_grad_hooks", None), _AfterGradient)


def _parameters(nodes: list[Any], seen: set[Any]) -> Iterator[Any]:
    """Those whose gradients come from these nodes, or from the gates that they stand for."""
    for node in nodes:
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        elif hasattr(node, "chain"):
            yield from _parameters([after for after, _ in node.next_functions], seen)


def _wrap(hooks: MutableMapping[int, Hook] | None, kind: type[_WithGradient] | type[_AfterGradient]) -> None:
    for key, hook in (hooks or {}).items():
        if not isinstance(hook, kind):
            hooks[key] = kind(hook)  # type: ignore[index]
