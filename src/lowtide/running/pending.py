"""The call of a model whose backward pass has not come yet."""

import weakref
from collections.abc import Callable
from typing import Any

from lowtide.running.backend import Progress
from lowtide.torchside.batch import tensors_in


class PendingCall:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._backwards = -1  # how many had run when a call last ended
        self._last: Callable[[], Any] = _nothing  # what its backward pass would run, if anybody still can

    def note(self, output: Any) -> None:
        """A call has ended."""
        self._backwards = self._progress.backwards
        self._last = _graph_behind(output)

    def is_there(self) -> bool:
        """Whether the backward pass of the last call has not come, and still can."""
        return self._backwards == self._progress.backwards and self._last() is not None


def _nothing() -> None:
    return None


def _graph_behind(output: Any) -> Callable[[], Any]:
    """A weak reference to what a backward pass from an output would run."""
    node: Any = next((tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None), None)
    while node is not None:
        try:
            return weakref.ref(node)
        except TypeError:  # autograd's own nodes; those of graphs are behind them
            node = node.next_functions[0][0] if node.next_functions else None
    return _nothing
