"""Who runs the rewritten graphs of a model.

An executor turns a graph into a function. What the graph runs, keeps and frees is decided before: an
executor must not save, recompute or reorder on its own.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import fx

from lowtide.torchside.ops.direct import direct_function

Function = Callable[[list[Any]], Any]
"""A graph as a function: it takes its inputs as one list, and empties that, so that each input is freed at
its last use."""


class Executor(Protocol):
    """`inputs` are fake tensors of the layouts that the function will get; None for a missing gradient."""

    @property
    def name(self) -> str: ...

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], *, is_backward: bool) -> Function: ...


class EagerOps:
    """Runs the ops one by one, each as eager PyTorch does: equal to it to the last bit."""

    name = "eager"

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], *, is_backward: bool) -> Function:
        return direct_function(module)


EAGER_OPS = EagerOps()
