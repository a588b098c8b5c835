"""Hooks of parameters stay silent where no gradient came.

A graph is one node of autograd with an edge to each of its parameters, also to those that the loss does not
reach this time. Eager has no such edge and calls none of their hooks; here autograd calls them with None.
"""

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch import Tensor

from lowtide.torchside import engine

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
    for parameter in _parameters(engine.nodes_after_this(), set()):
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
