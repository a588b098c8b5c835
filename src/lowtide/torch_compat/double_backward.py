"""Gradients of gradients: a planned graph has a backward pass, but no backward pass of that one.

`torch.autograd.grad(out, x, create_graph=True)` runs through a planned graph as any other backward pass. Its
result cannot be differentiated in turn. torch finds that out in the middle of the second backward pass, when
some parameters have their gradients. `refused` looks before the pass begins.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lowtide.errors import Unsupported
from lowtide.torch_compat.aot_autograd import is_compiled_graph
from lowtide.torch_compat.autograd_engine import BackwardCall, around_engine

SECOND = "CompiledFunctionBackwardBackward"
"""The class of autograd's node that would differentiate the backward pass of a compiled graph."""


class _Seen:
    """Whether any backward pass of the process could be differentiated; others need no look."""

    created_graph = False


def _checked(call: BackwardCall) -> AbstractContextManager[None]:
    if _Seen.created_graph and _has_second(call.roots):
        raise Unsupported(
            "this backward pass differentiates a gradient of the planned model (create_graph=True: gradient "
            "penalty, MAML, second derivatives), and a plan has one backward pass: lowtide.remove(model), or "
            "plan only the part of the model that is differentiated once"
        )
    _Seen.created_graph = _Seen.created_graph or call.creates_graph
    return nullcontext()


def _has_second(roots: Iterable[Any]) -> bool:
    stack = [node for node in roots if node is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if type(node).__name__ == SECOND and is_compiled_graph(node):
            return True
        following = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= following
        stack += following
    return False


refused = around_engine(_checked)
"""Held by what runs a planned model: a backward pass that such a graph does not have is refused."""
