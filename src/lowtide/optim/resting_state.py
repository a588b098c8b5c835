"""The optimizer's state of some parameters, which rests on a store between the steps.

    optimizer.state[p]["exp_avg"]    the user's object, its bytes on the store
    blocks of one chunk              [read][the optimizer's own code][written]

State is laid to rest where a plan is applied, where the first step makes it, and where `load_state_dict`
replaces it. Single numbers, such as step counts, and state of another shape than its parameter's stay in
memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide.offload.offload_store import (
    Layout,
    OffloadStore,
    RestingTensor,
    RestingTransfer,
    bytes_of,
    resting_of,
)
from lowtide.optim.split_step import is_shaped_as
from lowtide.torch_compat.dispatch import FakeTensor

Optimizer = torch.optim.Optimizer

WEIGHT = object()
"""In place of a key of state, the parameter itself."""
LEAST_BYTES = 64 << 10
"""Smaller tensors of state stay in memory: there, a transfer takes longer to begin than to copy."""


def may_rest(value: Any, parameter: Tensor) -> bool:
    """Whether a value of a parameter's state can be cut as the parameter, and is worth a place on a store."""
    is_plain = type(value) in (Tensor, nn.Parameter, FakeTensor)
    return is_plain and is_shaped_as(value, parameter) and value.nbytes >= LEAST_BYTES


class StateBlock(NamedTuple):
    """A torch block for bytes of one resting tensor from `start` on; `reading` until they are there."""

    resting: RestingTensor
    block: Tensor
    start: int
    reading: RestingTransfer


class RestingState:
    """Which state rests on `store`. `names`: by the identity of a parameter, its name; `find` gives those of
    the model's present parameters, where it may get others, as by `load_state_dict(assign=True)`."""

    def __init__(
        self,
        store: OffloadStore,
        names: Mapping[int, str],
        *,
        find: Callable[[], Mapping[int, str]] | None = None,
    ) -> None:
        self.store, self.names = store, dict(names)
        self._find = find
        self._resting: dict[tuple[int, int, Any], RestingTensor] = {}

    def follow(self) -> None:
        """A step begins: let the state of the model's present parameters rest."""
        if self._find is not None:
            self.names = dict(self._find())

    def has(self, parameter: Tensor) -> bool:
        return id(parameter) in self.names

    def of(self, optimizer: Optimizer, parameter: Tensor) -> dict[Any, RestingTensor]:
        """The resting state of a parameter, and by `WEIGHT` the parameter itself where it rests. State that
        the user has replaced is laid to rest first."""
        found: dict[Any, RestingTensor] = {}
        if (weight := resting_of(parameter)) is not None and parameter.is_contiguous():
            weight.look_after(parameter)
            found[WEIGHT] = weight
        if not self.has(parameter) or parameter not in optimizer.state:
            return found
        for key, value in optimizer.state[parameter].items():
            if may_rest(value, parameter):
                found[key] = self._laid(optimizer, parameter, key, value)
        return found

    def _laid(self, optimizer: Optimizer, parameter: Tensor, key: Any, value: Tensor) -> RestingTensor:
        place = (id(optimizer), id(parameter), key)
        resting = resting_of(value)
        if resting is None:
            if parameter.is_contiguous() and not value.is_contiguous():
                value.data = value.contiguous()  # rows of a parameter are then rows of its state
            elif value.untyped_storage().nbytes() != value.nbytes:
                value.data = value.clone()
            resting = self.store.rest(value, self._name(parameter, key))
        resting.look_after(value)
        self._resting[place] = resting
        return resting

    def note_torn(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
        """A step of these parameters has failed: what it has torn stays so until it has other values."""
        for parameter in parameters:
            values = optimizer.state[parameter].values() if parameter in optimizer.state else ()
            for value in (parameter, *(each for each in values if isinstance(each, Tensor))):
                resting = resting_of(value)
                if resting is not None:
                    resting.note_torn(value)

    def make(self, optimizer: Optimizer, parameter: Tensor, key: Any, dtype: torch.dtype) -> Tensor:
        """State of a whole parameter that rests from the start."""
        like = torch.empty_like(parameter, dtype=dtype, device="meta", requires_grad=False)
        resting = self.store.make_resting(Layout.of(like), self._name(parameter, key), parameter.device)
        self._resting[id(optimizer), id(parameter), key] = resting
        return resting.value()

    def write_rows(
        self, optimizer: Optimizer, parameter: Tensor, key: Any, value: Tensor, part: slice
    ) -> None:
        """Write rows of state that was made by `make`."""
        resting = self._resting[id(optimizer), id(parameter), key]
        start = part.start * (resting.nbytes // len(parameter))
        resting.start_write(bytes_of(value.contiguous()), start).wait()

    def _name(self, parameter: Tensor, key: Any) -> str:
        return f"{key} of {self.names[id(parameter)]}"

    def lay_down(self, optimizers: Iterable[Optimizer]) -> None:
        """Lay all state to rest that is there; `StoreError` where the store has no space for it."""
        for optimizer, parameter in _pairs(optimizers):
            self.of(optimizer, parameter)

    def bring_back(self, optimizers: Iterable[Optimizer]) -> None:
        """Give all state ordinary memory again."""
        for optimizer, parameter in _pairs(optimizers):
            for key, value in optimizer.state[parameter].items() if parameter in optimizer.state else ():
                resting = resting_of(value) if isinstance(value, Tensor) else None
                if resting is not None:
                    resting.return_to_memory(value, parameter.device)
                self._resting.pop((id(optimizer), id(parameter), key), None)


def _pairs(optimizers: Iterable[Optimizer]) -> Iterator[tuple[Optimizer, Tensor]]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield optimizer, parameter


def read_rows(resting: RestingTensor, parameter: Tensor, part: slice) -> StateBlock:
    """Begin to read some rows of a contiguous tensor of a parameter's state."""
    row_bytes = resting.nbytes // len(parameter)
    first, last, _ = part.indices(len(parameter))
    return _read(resting, parameter, first * row_bytes, (last - first) * row_bytes)


def read_whole(resting: RestingTensor, parameter: Tensor) -> StateBlock:
    return _read(resting, parameter, 0, resting.nbytes)


def _read(resting: RestingTensor, parameter: Tensor, start: int, nbytes: int) -> StateBlock:
    block = torch.empty(nbytes, dtype=torch.uint8, device=parameter.device)
    return StateBlock(resting, block, start, resting.start_read(block, start))


def rows_over(block: StateBlock, like: Tensor) -> Tensor:
    """The block's bytes as rows with the shape of `like`."""
    return block.block.view(block.resting.layout.dtype).view(like.shape)
