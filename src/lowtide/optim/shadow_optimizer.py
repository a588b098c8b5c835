"""A user's optimizer over other tensors: its steps change nothing of the user's.

- `shadow_of`: over fake tensors of the same layouts, with copies of all settings and state; to trace a step
- `small_optimizer`: a fresh optimizer over small real tensors; to compare results of steps, and to `estimate`
  the bytes of a step that cannot be traced

Shortcoming: an estimate is exact only for bytes that grow with the parameters; its gradients are random.
"""

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch

from lowtide.generators import generators_kept
from lowtide.offload.offload_store import resting_of
from lowtide.ops.device_memory import block_bytes, common_device
from lowtide.torch_compat.dispatch import (
    FakeTensor,
    FakeTensorMode,
    LiveBytes,
    TorchDispatchMode,
    iter_tensors,
    local,
    storage_key,
)
from lowtide.torch_compat.modules import forget_step_hooks

Optimizer = torch.optim.Optimizer
CONTAINERS = (list, tuple, dict, defaultdict, OrderedDict, set, deque)

MOST_STEPS = 200
"""After so many steps, an optimizer's state counts as fully grown. An optimizer that keeps a hundred earlier
directions needs most of these steps."""
STEADY_STEPS = 12
LARGEST_DIMENSION = 24


class ShadowOptimizer(NamedTuple):
    """An optimizer over `fakes`, which are keyed by the identity of the user's parameters; all of `mode`."""

    optimizer: Optimizer
    fakes: dict[int, torch.Tensor]
    mode: FakeTensorMode

    @property
    def device(self) -> torch.device:
        return common_device(self.fakes.values())


def shadow_of(optimizer: Optimizer, fakes: Mapping[int, torch.Tensor], mode: FakeTensorMode) -> Optimizer:
    """The same optimizer over `fakes`, which are keyed by the identity of the user's parameters.

    Plain containers are copied with their contents, inner optimizers too. Tensors become fake; tensors
    without dimensions, such as step counters, become real copies.
    """
    return _Shadow(fakes, mode).optimizer(optimizer)


def shadow_optimizer(optimizer: Optimizer) -> ShadowOptimizer:
    """The same optimizer over fake parameters of the same layouts."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    fakes = {id(parameter): fake_like(parameter, mode) for parameter in parameters}
    return ShadowOptimizer(shadow_of(optimizer, fakes, mode), fakes, mode)


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    requires_grad, tensor = tensor.requires_grad, local(tensor)
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return fake.requires_grad_(requires_grad)


class FakeFactories(TorchDispatchMode):
    """Let code over fake tensors make only fake ones, by `torch.zeros(shape)` too. A single number, such as a
    step counter, is real."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if next(iter_tensors((args, kwargs)), None) is None:
            with self.mode:
                made = func(*args, **kwargs)
            if isinstance(made, torch.Tensor) and made.numel() > 1:
                return made
        return func(*args, **kwargs)


def tensors_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """All tensors in an optimizer's plain containers, its parameters included, state first."""
    found: dict[int, torch.Tensor] = {}
    for value in (*_states(optimizer), vars(optimizer)):
        for tensor in _tensors(value, seen=set()):
            found[id(tensor)] = tensor
    return list(found.values())


def state_tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    """The tensors in the state of an optimizer, and of inner optimizers."""
    return [tensor for state in _states(optimizer) for tensor in _tensors(state, seen=set())]


def num_states(optimizer: Optimizer) -> int:
    """For how many parameters an optimizer, with its inner optimizers, has state."""
    return sum(map(len, _states(optimizer)))


def state_bytes(optimizers: Iterable[Optimizer], device: torch.device) -> int:
    """The bytes that optimizers' states take on a step's device; none for state that rests on a store. What
    several of them share counts once: a trainer may wrap an optimizer in another one."""
    states = [value for each in optimizers for state in _states(each) for value in state.values()]
    every = (tensor for tensor in map(local, _tensors(states, seen=set())) if resting_of(tensor) is None)
    found = {storage_key(tensor): tensor for tensor in every}
    return sum(block_bytes(device, tensor) for tensor in found.values())


def set_step_count(optimizer: Optimizer, number: int) -> None:
    """Let a shadow continue after step `number`, where its state counts steps."""
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
    """One copy of every object: a list of groups that two optimizers share stays one list."""

    def __init__(self, fakes: Mapping[int, torch.Tensor], mode: FakeTensorMode) -> None:
        self.fakes = fakes
        self.mode = mode
        self.copies: dict[int, Any] = {}

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        # not copy.copy: torch hooks the `step` of a copy's class, and a wrapper would call all hooks twice
        shadow = object.__new__(type(optimizer))
        self.copies[id(optimizer)] = shadow
        # a learning-rate scheduler counts calls by wrapping `step` on the instance
        own = {name: value for name, value in vars(optimizer).items() if name != "step"}
        shadow.__dict__.update({name: self.value(value) for name, value in own.items()})
        if "param_groups" in own:
            forget_step_hooks(shadow)
        return shadow

    def value(self, value: Any) -> Any:
        if id(value) in self.copies:
            return self.copies[id(value)]
        if isinstance(value, Optimizer):
            return self.optimizer(value)
        if isinstance(value, torch.Tensor):
            self.copies[id(value)] = made = self.tensor(value)
            return made
        return self.container(value) if type(value) in CONTAINERS else value

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self.fakes:
            return self.fakes[id(tensor)]
        return fake_like(tensor, self.mode) if tensor.dim() else tensor.detach().clone()

    def container(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self.value(item) for item in value)
        made = copy.copy(value)
        made.clear()
        self.copies[id(value)] = made
        if isinstance(value, dict):
            made.update({self.value(key): self.value(item) for key, item in value.items()})
        elif isinstance(value, set):
            made.update(self.value(item) for item in value)
        else:
            made.extend(self.value(item) for item in value)
        return made


def small_optimizer(optimizer: Optimizer, trained: Container[int]) -> tuple[Optimizer, list[torch.Tensor]]:
    """A fresh optimizer of the same class and settings over small parameters, and the small parameters of
    `trained` (by identity)."""
    parameters: list[torch.Tensor] = []
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        own = []
        for parameter in group["params"]:
            shape = [min(int(size), LARGEST_DIMENSION) for size in parameter.shape]
            own.append(small_parameter(parameter, shape))
            if id(parameter) in trained:
                parameters.append(own[-1])
        groups.append({**{key: copy.copy(value) for key, value in group.items()}, "params": own})
    build: Any = type(optimizer)
    return build(groups), parameters


def small_parameter(parameter: torch.Tensor, shape: Sequence[int]) -> torch.nn.Parameter:
    """A random parameter of the same dtype on the same device."""
    return torch.nn.Parameter(torch.randn(shape).to(real_device(parameter), parameter.dtype))


def real_device(parameter: torch.Tensor) -> torch.device:
    """The parameter's device; the CPU for a parameter without memory, whose device may be absent."""
    is_real = not isinstance(parameter, FakeTensor) and parameter.device.type != "meta"
    return parameter.device if is_real else torch.device("cpu")


def random_gradients(parameters: Sequence[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape).to(parameter.device, parameter.dtype)


@contextmanager
def seeded(optimizer: Optimizer) -> Iterator[None]:
    """Seed the CPU's generator; restore its state, and that of every device of the parameters, at the end.

    `torch.manual_seed` would seed the generators of all accelerators, and change the user's dropout there.
    """
    devices = {real_device(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    with generators_kept(devices):
        torch.default_generator.manual_seed(0)
        yield


@dataclass(frozen=True, slots=True)
class OptimizerEstimate:
    """Bytes of state, and the most that a step adds to them.

    `small` is a fresh small optimizer of the same kind. Its parameters `trained` (by identity) get gradients,
    and after many steps it has `small_state_bytes`.
    """

    state_bytes: int
    peak_bytes: int
    small: Optimizer
    trained: frozenset[int]
    small_state_bytes: int


def estimate(optimizer: Optimizer, trained: Container[int]) -> OptimizerEstimate:
    """State and temporaries of `optimizer`, scaled from a small one; passes on errors of its code."""
    with seeded(optimizer), torch.no_grad():
        small, parameters = small_optimizer(optimizer, trained)
        fresh, fresh_parameters = small_optimizer(optimizer, trained)
        _train(small, parameters)
        random_gradients(parameters)
        with LiveBytes(tensors_of(small)) as live:
            _step(small, parameters)
    own_bytes = sum(parameter.nbytes for parameter in parameters)
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    whole_bytes = sum(parameter.nbytes for parameter in every if id(parameter) in trained)
    scale, state_bytes = whole_bytes / max(1, own_bytes), _state_bytes(small)
    return OptimizerEstimate(
        state_bytes=round(state_bytes * scale),
        peak_bytes=round(live.peak_bytes * scale),
        small=fresh,
        trained=frozenset(id(parameter) for parameter in fresh_parameters),
        small_state_bytes=state_bytes,
    )


def _train(optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
    """Take steps until the state has not grown for a while."""
    largest, steady = -1, 0
    for _ in range(MOST_STEPS):
        random_gradients(parameters)
        _step(optimizer, parameters)
        now = _state_bytes(optimizer)
        steady = 0 if now > largest else steady + 1
        largest = max(largest, now)
        if steady == STEADY_STEPS:
            return


def _step(optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
    def closure() -> float:
        random_gradients(parameters)
        return float(torch.rand(()))

    try:
        optimizer.step(closure)
    except TypeError:
        optimizer.step()


def _state_bytes(optimizer: Optimizer) -> int:
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return sum(tensor.nbytes for tensor in tensors_of(optimizer) if id(tensor) not in own)
