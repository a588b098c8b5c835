"""Say once what a loop does that its plan does not count on.

The call of a model whose backward pass has not come yet.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lowtide.errors import Unsupported
from lowtide.optim.step_in_backward import gradient_bytes
from lowtide.runtime.backend import Progress
from lowtide.trace.model_call import tensors_in
from lowtide.units import format_size

logger = logging.getLogger("lowtide")

MANY_GRAPHS = 24
LARGE_SHARE = 0.25


class Notices:
    """`spare_bytes` are those of the budget that the plan leaves free; None where nobody gave a budget."""

    def __init__(self, spare_bytes: int | None) -> None:
        self.spare_bytes = spare_bytes
        self._said: set[str] = set()

    def leave_out(self, about: str) -> None:
        self._said.add(about)

    def tell_of_two_calls(self, progress: Progress, *, is_mended: bool) -> None:
        """Both hold what they save, and eager sums the gradients of a weight over both, which plans do where
        that `is_mended`."""
        saved_bytes = progress.saved_bytes
        if self._has_no_room(saved_bytes) and self._first_time("held"):
            logger.warning(
                "the model is called again before the backward pass of its last call, for which %s are held, "
                "and the plan did not count on them: the peak is higher by as much. Run backward() after "
                "each call, or plan for a budget that is smaller by %d bytes",
                format_size(saved_bytes),
                saved_bytes,
            )
        weight = progress.summed_in_cast or ("" if is_mended else progress.summed)
        if weight and self._first_time("calls"):
            logger.warning(
                "the model is called twice before a backward pass and uses '%s' several times in a call: "
                "each call sums its gradients alone, so that the last bits can differ from eager's. Run "
                "backward() after each call",
                weight,
            )

    def tell_of_many_graphs(self, number: int, share: float) -> None:
        """Where most of the time goes into planning them; `share` is that of it."""
        if number >= MANY_GRAPHS and share > LARGE_SHARE and self._first_time("graphs"):
            logger.warning(
                "%d graphs were planned so far, which took %.0f%% of the time since the plan was applied: "
                "every new shape, and every new value of a Python number that the forward reads, is a graph "
                "of its own. Pad batches to a few lengths (pad_to_multiple_of=64, say), and pass numbers "
                "that change as tensors",
                number,
                share * 100,
            )

    def tell_of_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Those that are there before the forward pass."""
        if self.spare_bytes is None or "gradients" in self._said:
            return
        nbytes = sum(map(gradient_bytes, parameters))
        if self._has_no_room(nbytes) and self._first_time("gradients"):
            logger.warning(
                "%s of gradients are there before the forward pass, and the plan did not count on them: the "
                "peak is higher by as much. Set them to None first (zero_grad), or, to accumulate gradients, "
                "plan with accumulate=True",
                format_size(nbytes),
            )

    def _has_no_room(self, nbytes: int) -> bool:
        return self.spare_bytes is not None and nbytes > max(0, self.spare_bytes)

    def _first_time(self, about: str) -> bool:
        if about in self._said:
            return False
        self._said.add(about)
        return True


def ran_without_plan(why: str) -> Unsupported:
    return Unsupported(
        f"the model ran without its plan, since torch.compile gave up on its forward pass ({why}). Is its "
        "code the same as when it was planned? Plan it as it trains, or lowtide.remove(model)"
    )


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
