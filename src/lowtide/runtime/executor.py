"""Who runs the rewritten graphs of a model.

An executor turns a graph into a function. What the graph runs, keeps and frees is decided before: an
executor must not save, recompute or reorder on its own.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import fx

from lowtide.ops.direct import direct_function, direct_parts

Function = Callable[[list[Any]], Any]
"""A graph as a function: it takes its inputs as one list, and empties that, so that each input is freed at
its last use."""


class Executor(Protocol):
    """`inputs` are fake tensors of the layouts that the function will get; None for a missing gradient."""

    @property
    def name(self) -> str: ...

    @property
    def in_place(self) -> bool:
        """Whether its graphs may have ops that write over what they read last."""

    @property
    def takes_numbers(self) -> bool:
        """Whether inputs of its graphs may be numbers of Python."""

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], *, is_backward: bool) -> Function: ...


Parts = Callable[[list[Any]], Iterator[None]]
"""Like a `Function`, run from one call of `hand_over` in the graph to the next."""


@runtime_checkable
class ExecutorInParts(Executor, Protocol):
    """One that can also wait inside of a graph, so that gradients leave it as soon as they are there."""

    def in_parts(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Parts: ...


class EagerOps:
    """Runs the ops one by one, each as eager PyTorch does: equal to it to the last bit."""

    name = "eager"
    in_place = True
    takes_numbers = True

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], *, is_backward: bool) -> Function:
        return direct_function(module)

    def in_parts(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Parts:
        return direct_parts(module)


EAGER_OPS = EagerOps()
