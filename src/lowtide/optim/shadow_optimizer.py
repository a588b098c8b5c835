"""A user's optimizer over other tensors, so that it can take a step that changes nothing of the user's."""

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch

from lowtide.torch_compat.dispatch import FakeTensorMode
from lowtide.torch_compat.fsdp2 import local
from lowtide.torch_compat.modules import forget_step_hooks

Optimizer = torch.optim.Optimizer
CONTAINERS = (list, tuple, dict, defaultdict, OrderedDict, set, deque)


class ShadowOptimizer(NamedTuple):
    """An optimizer over `fakes`, by the identity of the user's own parameters, all of `mode`."""

    optimizer: Optimizer
    fakes: dict[int, torch.Tensor]
    mode: FakeTensorMode


def shadow_of(optimizer: Optimizer, fakes: Mapping[int, torch.Tensor], mode: FakeTensorMode) -> Optimizer:
    """The same optimizer over the fake parameters `fakes`, by the identity of the user's own.

    Whatever it holds in plain containers comes along, other optimizers included: tensors become fake ones,
    and numbers of zero dimensions, such as step counters, are copied.
    """
    return _Shadow(fakes, mode).optimizer(optimizer)


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    requires_grad, tensor = tensor.requires_grad, local(tensor)
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return fake.requires_grad_(requires_grad)


def held_tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    """All tensors that an optimizer holds in plain containers, its parameters included, state first."""
    found: dict[int, torch.Tensor] = {}
    for value in (*_states(optimizer), vars(optimizer)):
        for tensor in _tensors(value, seen=set()):
            found[id(tensor)] = tensor
    return list(found.values())


def state_tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    """The tensors that an optimizer has as the state of its parameters, those of optimizers inside it too."""
    return [tensor for state in _states(optimizer) for tensor in _tensors(state, seen=set())]


def go_on_to(optimizer: Optimizer, number: int) -> None:
    """Let a double count on as if it had taken as many steps, where it keeps a count of them."""
    for states in _states(optimizer):
        for state in states.values():
            count = state.get("step") if isinstance(state, dict) else None
            if isinstance(count, torch.Tensor) and not count.dim() and type(count) is torch.Tensor:
                count.fill_(number)
            elif type(count) is int:
                state["step"] = number


def _states(optimizer: Optimizer) -> Iterator[Mapping[Any, Any]]:
    state = vars(optimizer).get("state")
    if state is not None:
        yield state
    for value in vars(optimizer).values():
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, Optimizer):
                yield from _states(item)


def _tensors(value: Any, *, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Optimizer):
        yield from _tensors(vars(value), seen=seen)
    elif isinstance(value, CONTAINERS):
        for item in chain(value, value.values()) if isinstance(value, dict) else value:
            yield from _tensors(item, seen=seen)


class _Shadow:
    """One copy of everything; what occurs twice, such as a list of groups that two share, stays one."""

    def __init__(self, fakes: Mapping[int, torch.Tensor], mode: FakeTensorMode) -> None:
        self.fakes = fakes
        self.mode = mode
        self.done: dict[int, Any] = {}

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        double = copy.copy(optimizer)
        double.__dict__ = {}
        self.done[id(optimizer)] = double
        # a learning-rate scheduler counts calls by wrapping `step` on the instance
        own = {name: value for name, value in vars(optimizer).items() if name != "step"}
        double.__dict__.update({name: self.value(value) for name, value in own.items()})
        if "param_groups" in own:
            forget_step_hooks(double)
        return double

    def value(self, value: Any) -> Any:
        if id(value) in self.done:
            return self.done[id(value)]
        if isinstance(value, torch.Tensor):
            made: Any = self.tensor(value)
        elif isinstance(value, Optimizer):
            return self.optimizer(value)
        elif type(value) in CONTAINERS:
            return self.container(value)
        else:
            return value
        self.done[id(value)] = made
        return made

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self.fakes:
            return self.fakes[id(tensor)]
        return fake_like(tensor, self.mode) if tensor.dim() else tensor.detach().clone()

    def container(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self.value(item) for item in value)
        made = copy.copy(value)
        made.clear()
        self.done[id(value)] = made
        if isinstance(value, dict):
            made.update({self.value(key): self.value(item) for key, item in value.items()})
        elif isinstance(value, set):
            made.update(self.value(item) for item in value)
        else:
            made.extend(self.value(item) for item in value)
        return made
