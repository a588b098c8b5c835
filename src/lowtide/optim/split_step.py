"""The optimizer's step in chunks: a few parameters at a time, or a few rows of one large parameter.

    optimizer.step()                 [ embedding | weight | bias | weight | bias ]
    in chunks                        [ rows 0-63 ][ rows 64-99 ][ weight | bias ][ weight | bias ]

Temporaries are then as large as a chunk, not as large as all parameters. The optimizer's own code runs on
each chunk. State of a parameter's shape is cut at the same rows.
"""

import copy
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide.optim.joined_optimizers import Arguments, has_arguments, run_closure
from lowtide.torch_compat.dispatch import storage_key
from lowtide.torch_compat.modules import hooks_before_step

if TYPE_CHECKING:
    from lowtide.optim.resting_step import RestingStep

Optimizer = torch.optim.Optimizer

logger = logging.getLogger("lowtide")

CHUNK_SIZES = tuple(n << 20 for n in (4, 16, 64, 256))
"""Largest bytes of parameters in a chunk. One row, or a parameter that cannot be cut, may be larger. A plan
takes the largest size that fits into its budget."""
CHUNK_BYTES = CHUNK_SIZES[1]
"""The chunk size of a step in backward."""
ALIGNED_ROWS = 64
"""Chunks end at multiples of this, so that as few vectors of elements as possible are cut."""


class StepChunk(NamedTuple):
    """Some parameters, or one parameter that is updated `rows` at a time."""

    parameters: list[Tensor]
    rows: int = 0

    def take_step(self, optimizer: Optimizer) -> None:
        if self.rows:
            step_in_rows(optimizer, self.parameters[0], self.rows)
        else:
            step_for(optimizer, self.parameters)


def take_step(
    optimizer: Optimizer,
    parameters: Iterable[Tensor],
    *,
    within_parameters: bool,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """The step for all `parameters` that have a gradient, chunk by chunk."""
    for chunk in chunks_of(parameters, within_parameters=within_parameters, chunk_bytes=chunk_bytes):
        chunk.take_step(optimizer)


def chunks_of(
    parameters: Iterable[Tensor], *, within_parameters: bool, chunk_bytes: int
) -> Iterator[StepChunk]:
    """The chunks of a step for all `parameters` that have a gradient, in order.

    Without `within_parameters`, each parameter is in one chunk.
    """
    few: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        rows = _rows_per_chunk(parameter, chunk_bytes)
        if within_parameters and parameter.dim() and rows < len(parameter):
            yield StepChunk([parameter], rows)
            continue
        if few and sum(p.nbytes for p in few) + parameter.nbytes > chunk_bytes:
            yield StepChunk(few)
            few = []
        few.append(parameter)
    if few:
        yield StepChunk(few)


def _rows_per_chunk(parameter: Tensor, chunk_bytes: int) -> int:
    """The number of rows in a chunk; all rows where the parameter is small, or cannot be cut."""
    if parameter.dim() == 0 or not parameter.is_contiguous() or parameter.nbytes <= chunk_bytes:
        return len(parameter) if parameter.dim() else 0
    rows = chunk_bytes // max(1, parameter[0].nbytes)
    return max(1, rows // ALIGNED_ROWS * ALIGNED_ROWS or rows)


def step_for(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    """`optimizer.step()` for some of its parameters, without the hooks of a whole step."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    with torch.no_grad(), _only(optimizer, parameters):
        step(optimizer)


def step_in_rows(
    optimizer: Optimizer, parameter: Tensor, rows: int, *, most_chunks: int | None = None
) -> None:
    """`step_for` one parameter, in chunks of `rows`; only the first `most_chunks` where given."""
    steps = RowSteps(optimizer, parameter)
    for first in range(0, len(parameter), rows)[:most_chunks]:
        part = slice(first, first + rows)
        for key, value in steps.take(part).items():
            steps.keep(key, value, part)
    steps.finish()


class RowSteps:
    """The step of one parameter, some rows at a time. Every chunk sees the step count of before."""

    def __init__(self, optimizer: Optimizer, parameter: Tensor) -> None:
        self.optimizer, self.parameter = optimizer, parameter
        self.before: dict[Any, Any] = dict(optimizer.state.get(parameter, {}))
        self.after: dict[Any, Any] = {}
        self._group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))

    def take(
        self,
        part: slice,
        rows: Mapping[Any, Tensor] = MappingProxyType({}),
        *,
        weight: Tensor | None = None,
    ) -> dict[Any, Tensor]:
        """The step for some rows. Returns the state of these rows. `rows` has state that does not come from
        that of the whole parameter, and `weight` the rows of the parameter where they do not either."""
        parameter, state = self.parameter, self.optimizer.state
        grad = parameter.grad
        assert grad is not None
        values = parameter.detach()[part] if weight is None else weight
        some = nn.Parameter(values, requires_grad=parameter.requires_grad)
        some.grad = grad[part]
        if self.before:
            state[some] = {
                key: rows[key] if key in rows else _rows_of(value, parameter, part)
                for key, value in self.before.items()
            }
        every, self._group["params"] = self._group["params"], [some]
        try:
            step_for(self.optimizer, [some])
        finally:
            self._group["params"] = every
            found = dict(state.pop(some, {}))
        shaped = {key: value for key, value in found.items() if is_shaped_as(value, some)}
        self.after |= {key: value for key, value in found.items() if key not in shaped}
        return shaped

    def keep(self, key: Any, value: Tensor, part: slice) -> None:
        """Copy rows of state into the state of the whole parameter, unless they are there."""
        if key not in self.after and key in self.before:
            self.after[key] = self.before[key]
        elif key not in self.after:
            self.after[key] = torch.empty_like(self.parameter, dtype=value.dtype, requires_grad=False)
        kept = self.after[key][part]
        if storage_key(kept) != storage_key(value):
            kept.copy_(value)

    def finish(self) -> None:
        if self.after:
            self.optimizer.state[self.parameter] = self.after


def is_shaped_as(value: Any, parameter: Tensor) -> bool:
    """Whether state has an element for each of the parameter's."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


def _rows_of(value: Any, parameter: Tensor, part: slice) -> Any:
    """The rows of a parameter's state; a copy of state that has another shape."""
    if is_shaped_as(value, parameter):
        rows: Tensor = value[part]
        return rows
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)


@contextmanager
def _only(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Iterator[None]:
    """A context in which the optimizer has only these parameters, and no empty groups."""
    wanted = {id(parameter) for parameter in parameters}
    groups = optimizer.param_groups
    every = [group["params"] for group in groups]
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) in wanted]
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        for group, own in zip(groups, every, strict=True):
            group["params"] = own
        optimizer.param_groups = groups


@contextmanager
def settings_return(optimizer: Optimizer) -> Iterator[None]:
    """The context of a step in chunks, of which each changes the optimizer's groups and state for a while. An
    interrupt can come while a chunk puts them back: then they are put back here."""
    groups, every = optimizer.param_groups, [group["params"] for group in optimizer.param_groups]
    try:
        yield
    except BaseException:
        optimizer.param_groups = groups
        for group, own in zip(groups, every, strict=True):
            group["params"] = own
        known = {id(parameter) for own in every for parameter in own}
        for key in [key for key in optimizer.state if isinstance(key, Tensor) and id(key) not in known]:
            del optimizer.state[key]
        raise


class SplitStep:
    """Splits `optimizer.step()` of the user's loop into chunks, from `open` to `close`.

    A hook takes the step for all chunks right before the step itself, which then finds no gradients. After
    the step, a second hook restores the gradients. `resting` takes the steps where state rests on a store.
    """

    def __init__(
        self,
        optimizers: Iterable[Optimizer],
        *,
        within_parameters: bool,
        chunk_bytes: int = CHUNK_BYTES,
        resting: "RestingStep | None" = None,
    ) -> None:
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self.within_parameters = within_parameters
        self.chunk_bytes = chunk_bytes
        self.resting = resting
        self._has_warned = False
        self._is_stepping = False
        self._nested = 0
        """calls of `super().step()` in the code of a subclass, whose hooks are these again"""
        self._hooks: list[Any] = []
        self._grads: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def open(self) -> None:
        for reference in self._optimizers:
            optimizer = reference()
            if optimizer is not None:
                self._hooks.append(optimizer.register_step_pre_hook(self._before))
                self._hooks.append(optimizer.register_step_post_hook(self._after))
        if self.resting is not None:
            self._hooks += self.resting.open(self._alive)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.resting is not None:
            self.resting.close(self._alive)

    @property
    def _alive(self) -> list[Optimizer]:
        return [alive for reference in self._optimizers if (alive := reference()) is not None]

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Arguments | None:
        arguments: Arguments | None = None
        if self._is_stepping or self._is_inside(optimizer):
            self._nested += 1
            return None
        # a later hook may still change gradients
        is_last = hooks_before_step(optimizer)[-1] == self._before
        if not is_last or (has_arguments(args, kwargs) and (arguments := run_closure(args, kwargs)) is None):
            self._warn()
            if self.resting is not None:
                self.resting.wake(optimizer)
            return None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self.resting is not None:
            self.resting.state.follow()
        take = take_step if self.resting is None else self.resting.take
        self._is_stepping, self._nested = True, 0
        grads = [(p, p.grad) for p in parameters if p.grad is not None]
        try:
            with settings_return(optimizer):
                take(
                    optimizer,
                    parameters,
                    within_parameters=self.within_parameters,
                    chunk_bytes=self.chunk_bytes,
                )
            self._is_stepping, self._nested = False, 0
            self._grads[id(optimizer)] = grads
            for parameter in parameters:
                parameter.grad = None
        except BaseException:
            self._is_stepping, self._nested = False, 0
            self._grads.pop(id(optimizer), None)
            for parameter, grad in grads:
                parameter.grad = grad
            raise
        return arguments

    def _is_inside(self, optimizer: Optimizer) -> bool:
        """Whether a step that found no gradients is running. One that was interrupted has left its gradients
        here, and the loop has made others since."""
        grads = self._grads.get(id(optimizer))
        if grads is not None and any(parameter.grad is not None for parameter, _ in grads):
            del self._grads[id(optimizer)]
            return False
        return grads is not None

    def _after(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._nested:
            self._nested -= 1
            return
        for parameter, grad in self._grads.pop(id(optimizer), ()):
            parameter.grad = grad
        if self.resting is not None:
            self.resting.state.lay_down([optimizer])

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the optimizer's step goes whole, since it is not torch's own and was given a closure, or "
                "another hook comes after lowtide's: its temporaries take more than the plan counts on. Call "
                "optimizer.step() without arguments, and register hooks before the plan is applied"
            )
