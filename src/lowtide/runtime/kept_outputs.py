"""What the user's loop keeps live of a model's earlier outputs while the next forward pass runs.

    output = model(batch)                   until the call returns, the name keeps the last output
    seen.append(output.detach())            a list keeps the output of every step

Storages are referred to weakly: the loop alone keeps them.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from lowtide.torch_compat.dispatch import WeakStorages
from lowtide.trace.model_call import tensors_in

WATCHED_CALLS = 4


class KeptOutputs:
    """The outputs of a model's last calls; `own_tensors` are the model's, which may be among them."""

    def __init__(self, own_tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._own_tensors = own_tensors
        self._calls: deque[WeakStorages] = deque(maxlen=WATCHED_CALLS)

    def call_returned(self, output: Any) -> None:
        self._calls.append(WeakStorages(tensor for tensor in tensors_in(output) if tensor.dim()))

    def live_bytes(self, batch: Any, *, counted_bytes: int) -> list[int]:
        """The live bytes of each call, zeros left out; where they are more than `counted_bytes`, without the
        model's own tensors and those of a `batch`."""
        return self._live(self._calls, batch, counted_bytes)

    def storages(self) -> set[int]:
        """Of all these calls, as `storage_key` has them."""
        return set[int]().union(*(call.keys() for call in self._calls))

    def live_bytes_before(self) -> int:
        """The live bytes of the calls before the last one."""
        return sum(self._live(list(self._calls)[:-1], (), 0))

    def _live(self, calls: Iterable[WeakStorages], batch: Any, counted_bytes: int) -> list[int]:
        live = [(call, nbytes) for call in calls if (nbytes := call.live_bytes())]
        if sum(nbytes for _, nbytes in live) <= counted_bytes:
            return [nbytes for _, nbytes in live]
        besides = [*self._own_tensors(), *tensors_in(batch)]
        return [nbytes for call, _ in live if (nbytes := call.live_bytes(besides=besides))]
