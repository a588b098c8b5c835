"""The optimizer's step in chunks: a few parameters at a time, or a few rows of one large parameter.

    optimizer.step()                 [ embedding | weight | bias | weight | bias ]
    in chunks                        [ rows 0-63 ][ rows 64-99 ][ weight | bias ][ weight | bias ]

Temporaries are then as large as a chunk, not as large as all parameters. The optimizer's own code runs on
each chunk. State of a parameter's shape is cut at the same rows.
"""

import copy
import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide.optim.joined_optimizers import Arguments, has_arguments, run_closure
from lowtide.torch_compat.dispatch import storage_key
from lowtide.torch_compat.modules import hooks_before_step

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
    before = dict(optimizer.state.get(parameter, {}))
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    grad = parameter.grad
    assert grad is not None
    after: dict[Any, Any] = {}
    for first in range(0, len(parameter), rows)[:most_chunks]:
        part = slice(first, first + rows)
        some = nn.Parameter(parameter.detach()[part], requires_grad=parameter.requires_grad)
        some.grad = grad[part]
        if before:
            optimizer.state[some] = {key: _rows_of(value, parameter, part) for key, value in before.items()}
        every, group["params"] = group["params"], [some]
        try:
            step_for(optimizer, [some])
        finally:
            group["params"] = every
        for key, value in optimizer.state.pop(some, {}).items():
            if not isinstance(value, Tensor) or value.shape != some.shape or not value.dim():
                after[key] = value
                continue
            if key not in after and key in before:
                after[key] = before[key]
            elif key not in after:
                after[key] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
            kept = after[key][part]
            if storage_key(kept) != storage_key(value):
                kept.copy_(value)
    if after:
        optimizer.state[parameter] = after


def _rows_of(value: Any, parameter: Tensor, part: slice) -> Any:
    """The rows of a parameter's state; a copy of state that has another shape."""
    if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape:
        return value[part]
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


class SplitStep:
    """Splits `optimizer.step()` of the user's loop into chunks, from `open` to `close`.

    A hook takes the step for all chunks right before the step itself, which then finds no gradients. After
    the step, a second hook restores the gradients.
    """

    def __init__(
        self, optimizers: Iterable[Optimizer], *, within_parameters: bool, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self.within_parameters = within_parameters
        self.chunk_bytes = chunk_bytes
        self._has_warned = False
        self._hooks: list[Any] = []
        self._grads: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def open(self) -> None:
        for reference in self._optimizers:
            optimizer = reference()
            if optimizer is not None:
                self._hooks.append(optimizer.register_step_pre_hook(self._before))
                self._hooks.append(optimizer.register_step_post_hook(self._after))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Arguments | None:
        arguments: Arguments | None = None
        # a later hook may still change gradients
        is_last = hooks_before_step(optimizer)[-1] == self._before
        if not is_last or (has_arguments(args, kwargs) and (arguments := run_closure(args, kwargs)) is None):
            self._warn()
            return None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        take_step(
            optimizer, parameters, within_parameters=self.within_parameters, chunk_bytes=self.chunk_bytes
        )
        self._grads[id(optimizer)] = [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter in parameters:
            parameter.grad = None
        return arguments

    def _after(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        for parameter, grad in self._grads.pop(id(optimizer), ()):
            parameter.grad = grad

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the optimizer's step goes whole, since it is not torch's own and was given a closure, or "
                "another hook comes after lowtide's: its temporaries take more than the plan counts on. Call "
                "optimizer.step() without arguments, and register hooks before the plan is applied"
            )
