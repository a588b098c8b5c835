"""Which ops give other bits when they run again on the same inputs.

`ops_that_differ` runs eager steps. Every op that torch dispatches runs several times: forward, backward and
optimizer. An op that writes to its arguments runs again on copies of what they were; a random op draws again
from the same state.

Shortcoming: an op alone may have another load on the machine than in the step. An op that differs rarely may
be missed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowtide.generators import random_state, with_generators
from lowtide.ops.random_ops import drawing_from
from lowtide.ops.schema import is_view_op, short_name, talks_to_others
from lowtide.profiling.repeat_trials import same_results
from lowtide.torch_compat.dispatch import (
    OpOverload,
    TorchDispatchMode,
    iter_tensors,
    map_leaves,
    schema_of,
    storage_key,
)

TIMES = 4
"""How often an op runs again; with two threads, two runs are often equal by luck."""
WITHOUT_VALUES = ("empty", "new_empty", "resize", "set_", "detach")
"""Ops whose results nobody has written yet, or that make no values."""

RUNNING = ("running_mean", "running_var")
"""Arguments that batch norms write to, of which some schemas do not tell."""


class RepeatedOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs each op again; `different` has the names of ops whose results differ, in the order they ran."""

    def __init__(self, times: int = TIMES) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.times = times
        self.different: dict[str, None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = (args, kwargs or {})
        if not _can_run_again(func, given):
            return func(*args, **given[1])
        written = _written(func, given)
        before = [_copy(tensor) for tensor in written]
        states = _states(func, given)
        result = func(*args, **given[1])
        for _ in range(self.times):
            copies = [_copy(tensor) for tensor in before]
            swapped = _swapped(given, written, copies)
            with drawing_from(states):
                again = func(*swapped[0], **swapped[1])
            if not same_results([result, written], [again, copies]):
                self.different.setdefault(_name(func))
                break
        return result


def ops_that_differ(step: Callable[[], object]) -> tuple[str, ...]:
    """The names of ops that differ from themselves while `step()` runs."""
    with RepeatedOps() as mode:
        step()
    return tuple(mode.different)


def _can_run_again(func: Any, given: Any) -> bool:
    if not isinstance(func, OpOverload) or talks_to_others(func) or is_view_op(func):
        return False
    if short_name(func).lstrip("_").startswith(WITHOUT_VALUES):
        return False
    written = {id(tensor) for tensor in _written(func, given)}
    keys = {storage_key(tensor) for tensor in iter_tensors(given) if id(tensor) in written}
    # a view of what is written would read the written values in the second run
    return not any(storage_key(t) in keys for t in iter_tensors(given) if id(t) not in written)


def _written(func: Any, given: tuple[tuple[Any, ...], dict[str, Any]]) -> list[torch.Tensor]:
    """The tensors that the op writes to, each once."""
    args, kwargs = given
    schema = schema_of(func)
    found = []
    for place, argument in enumerate(schema.arguments):
        is_marked = argument.alias_info is not None and argument.alias_info.is_write
        if is_marked or argument.name in RUNNING:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += list(iter_tensors(value))
    return list({id(tensor): tensor for tensor in found}.values())


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides: another order in memory may round otherwise."""
    copied = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copied.copy_(tensor)


def _swapped(given: Any, written: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> Any:
    by_id = {id(tensor): copy for tensor, copy in zip(written, copies, strict=True)}
    return map_leaves(lambda leaf: by_id.get(id(leaf), leaf), given)


def _states(func: Any, given: Any) -> dict[str, torch.Tensor]:
    """The generator states that a random op draws from."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return {}
    devices = with_generators(tensor.device for tensor in iter_tensors(given))
    return {device: random_state(device) for device in devices}


def _name(func: Any) -> str:
    return f"{func.namespace}.{short_name(func)}"
