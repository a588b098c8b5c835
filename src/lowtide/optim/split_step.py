"""An optimizer's step in pieces: for a few parameters at a time, and for a large one in slices of its rows.

Temporaries are then as large as a piece and not as large as all parameters, or the largest of them. The
optimizer's own code runs on each piece. State that has the shape of a parameter is cut with it.
"""

import copy
import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide.optim.joined_optimizers import Arguments, closure_done, has_arguments
from lowtide.torch_compat.dispatch import storage_key
from lowtide.torch_compat.modules import hooks_before_step

Optimizer = torch.optim.Optimizer

logger = logging.getLogger("lowtide")

PIECE_SIZES = tuple(n << 20 for n in (4, 16, 64, 256))
"""What a piece may have of the parameters, unless a row, or a parameter that cannot be cut, is larger. Of
those that fit into a budget, a plan takes the largest."""
PIECE_BYTES = PIECE_SIZES[1]
"""Where a step is taken in backward."""
ALIGNED_ROWS = 64
"""Slices end at such rows, so that vectors of elements are cut as little as possible."""


def step_for(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    """`optimizer.step()` for some of its parameters, without the hooks that are for a whole step."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    with torch.no_grad(), _only(optimizer, parameters):
        step(optimizer)


def step_in_slices(
    optimizer: Optimizer, parameter: Tensor, rows: int, *, most_slices: int | None = None
) -> None:
    """The same for one parameter, `rows` of it at a time. `most_slices` is for those who only look on."""
    whole = optimizer.state.get(parameter, {})
    before = dict(whole)
    group = _group_of(optimizer, parameter)
    grad = parameter.grad
    assert grad is not None
    after: dict[Any, Any] = {}
    for first in range(0, len(parameter), rows)[:most_slices]:
        part = slice(first, first + rows)
        some = nn.Parameter(parameter.detach()[part], requires_grad=parameter.requires_grad)
        some.grad = grad[part]
        if before:
            optimizer.state[some] = {key: _part(value, parameter, part) for key, value in before.items()}
        with _instead(group, [some]):
            step_for(optimizer, [some])
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


def rows_of(parameter: Tensor, piece_bytes: int) -> int:
    """How many rows of a parameter make a piece; all of them where it is small, or cannot be cut."""
    if parameter.dim() == 0 or not parameter.is_contiguous() or parameter.nbytes <= piece_bytes:
        return len(parameter) if parameter.dim() else 0
    rows = piece_bytes // max(1, parameter[0].nbytes)
    return max(1, rows // ALIGNED_ROWS * ALIGNED_ROWS or rows)


class Piece(NamedTuple):
    """Some parameters, or one that goes `rows` at a time."""

    parameters: list[Tensor]
    rows: int = 0

    def take_step(self, optimizer: Optimizer) -> None:
        if self.rows:
            step_in_slices(optimizer, self.parameters[0], self.rows)
        else:
            step_for(optimizer, self.parameters)


def pieces_of(parameters: Iterable[Tensor], *, slices: bool, piece_bytes: int) -> Iterator[Piece]:
    """The pieces of a step for all `parameters` that have a gradient, in their order."""
    few: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        rows = rows_of(parameter, piece_bytes)
        if slices and parameter.dim() and rows < len(parameter):
            yield Piece([parameter], rows)
            continue
        if few and sum(p.nbytes for p in few) + parameter.nbytes > piece_bytes:
            yield Piece(few)
            few = []
        few.append(parameter)
    if few:
        yield Piece(few)


def take_step(
    optimizer: Optimizer, parameters: Iterable[Tensor], *, slices: bool, piece_bytes: int = PIECE_BYTES
) -> None:
    """The step for all `parameters` that have a gradient, in pieces."""
    for piece in pieces_of(parameters, slices=slices, piece_bytes=piece_bytes):
        piece.take_step(optimizer)


class Pieces:
    """Lets `optimizer.step()` of the user's loop go in pieces, from `open` to `close`.

    The pieces are done right before the step itself, which then finds no gradients; they come back after it.
    """

    def __init__(
        self, optimizers: Iterable[Optimizer], *, slices: bool, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self.slices = slices
        self.piece_bytes = piece_bytes
        self._told = False
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
        done: Arguments | None = None
        if not self._is_last(optimizer) or (
            has_arguments(args, kwargs) and (done := closure_done(args, kwargs)) is None
        ):
            self._warn()
            return None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        take_step(optimizer, parameters, slices=self.slices, piece_bytes=self.piece_bytes)
        self._grads[id(optimizer)] = [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter in parameters:
            parameter.grad = None
        return done

    def _after(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        for parameter, grad in self._grads.pop(id(optimizer), ()):
            parameter.grad = grad

    def _is_last(self, optimizer: Optimizer) -> bool:
        """Whether no hook comes after ours that may still change gradients."""
        return bool(hooks_before_step(optimizer)[-1] == self._before)

    def _warn(self) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "the optimizer's step goes whole, since it is not torch's own and was given a closure, or "
                "another hook comes after lowtide's: its temporaries take more than the plan counts on. Call "
                "optimizer.step() without arguments, and register hooks before the plan is applied"
            )


def _part(value: Any, parameter: Tensor, part: slice) -> Any:
    if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape:
        return value[part]
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)


def _group_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    return next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))


@contextmanager
def _instead(group: dict[str, Any], parameters: list[Any]) -> Iterator[None]:
    every = group["params"]
    group["params"] = parameters
    try:
        yield
    finally:
        group["params"] = every


@contextmanager
def _only(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Iterator[None]:
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
