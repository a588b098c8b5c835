"""What an optimizer holds that cannot be traced, from one of its kind over a few small parameters.

Its state and the most that a step adds are measured there and scaled by the bytes of the parameters.
Shortcomings: exact only for what grows with the parameters, as almost all state does; gradients are random.
"""

import copy
from collections.abc import Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.optim.shadow_optimizer import held_tensors
from lowtide.torch_compat.dispatch import (
    FakeTensor,
    StorageWeakRef,
    TorchDispatchMode,
    iter_tensors,
    storage_key,
)

Optimizer = torch.optim.Optimizer

MOST_STEPS = 200
"""The steps after which an optimizer's state is taken not to grow any more; one that remembers a hundred
earlier directions needs most of them."""
STEADY_STEPS = 12
LARGEST_DIMENSION = 24


@dataclass(frozen=True, slots=True)
class OptimizerEstimate:
    """Bytes of state, and the most that a step adds to them.

    `small` is a fresh optimizer of the same kind over small parameters, of which `trained` (by identity) get
    gradients, and which has `small_state_bytes` after many steps.
    """

    state_bytes: int
    peak_bytes: int
    small: Optimizer
    trained: frozenset[int]
    small_state_bytes: int


def estimate(optimizer: Optimizer, gradients: Container[int]) -> OptimizerEstimate:
    """State and temporaries of `optimizer`, which is only looked at. Raises whatever its code raises."""
    with seeded(optimizer), torch.no_grad():
        small, parameters = small_one(optimizer, gradients)
        fresh, trained = small_one(optimizer, gradients)
        _train(small, parameters)
        give_gradients(parameters)
        with _LiveBytes(held_tensors(small)) as held:
            _step(small, parameters)
    own = sum(parameter.nbytes for parameter in parameters)
    whole = sum(
        parameter.nbytes
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in gradients
    )
    scale, state_bytes = whole / max(1, own), _state_bytes(small, parameters)
    return OptimizerEstimate(
        state_bytes=round(state_bytes * scale),
        peak_bytes=round(held.peak_bytes * scale),
        small=fresh,
        trained=frozenset(id(parameter) for parameter in trained),
        small_state_bytes=state_bytes,
    )


class _LiveBytes(TorchDispatchMode):
    """The most that is there of `tensors` and of what ops make, beyond what was there at the start."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._alive: dict[int, tuple[int, StorageWeakRef]] = {}
        for tensor in tensors:
            self._add(tensor)
        self._start_bytes = self._bytes()

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._alive[storage_key(tensor)] = (storage.nbytes(), StorageWeakRef(storage))  # type: ignore[no-untyped-call]

    def _bytes(self) -> int:
        return sum(nbytes for nbytes, _ in self._alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._alive = {key: one for key, one in self._alive.items() if not one[1].expired()}  # type: ignore[no-untyped-call]
        before = {storage_key(tensor) for tensor in iter_tensors((args, kwargs))}
        result = func(*args, **kwargs)
        for tensor in iter_tensors(result):
            if storage_key(tensor) not in before:
                self._add(tensor)
        self.peak_bytes = max(self.peak_bytes, self._bytes() - self._start_bytes)
        return result


def small_one(optimizer: Optimizer, gradients: Container[int]) -> tuple[Optimizer, list[torch.Tensor]]:
    """A fresh optimizer of the same kind over small parameters, and those of them that get gradients."""
    parameters: list[torch.Tensor] = []
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        own = []
        for parameter in group["params"]:
            shape = [min(int(size), LARGEST_DIMENSION) for size in parameter.shape]
            small = small_parameter(parameter, shape)
            own.append(small)
            if id(parameter) in gradients:
                parameters.append(small)
        groups.append({**{key: copy.copy(value) for key, value in group.items()}, "params": own})
    build: Any = type(optimizer)
    return build(groups), parameters


def small_parameter(parameter: torch.Tensor, shape: Sequence[int]) -> torch.nn.Parameter:
    """A random parameter of the same dtype on the same device."""
    return torch.nn.Parameter(torch.randn(shape).to(real_device(parameter), parameter.dtype))


def real_device(parameter: torch.Tensor) -> torch.device:
    """Where a real tensor like `parameter` can be: one without memory, or of an absent device, has no such
    place."""
    is_real = not isinstance(parameter, FakeTensor) and parameter.device.type != "meta"
    return parameter.device if is_real else torch.device("cpu")


@contextmanager
def seeded(optimizer: Optimizer) -> Iterator[None]:
    """Seed the CPU's generator; restore its state, and that of every device of the parameters, at the end.

    `torch.manual_seed` would seed the generators of all accelerators, and change the user's dropout there.
    """
    devices = {real_device(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for device in devices - {torch.device("cpu")}:
            stack.enter_context(torch.random.fork_rng([device], device_type=device.type))
        torch.default_generator.manual_seed(0)
        yield


def _train(optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
    """Steps until the state has not grown for a while."""
    largest, steady = -1, 0
    for _ in range(MOST_STEPS):
        give_gradients(parameters)
        _step(optimizer, parameters)
        now = _state_bytes(optimizer, parameters)
        steady = 0 if now > largest else steady + 1
        largest = max(largest, now)
        if steady == STEADY_STEPS:
            return


def _step(optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
    def closure() -> float:
        give_gradients(parameters)
        return float(torch.rand(()))

    try:
        optimizer.step(closure)
    except TypeError:
        optimizer.step()


def give_gradients(parameters: Sequence[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape).to(parameter.device, parameter.dtype)


def _state_bytes(optimizer: Optimizer, parameters: list[torch.Tensor]) -> int:
    own = {id(parameter) for parameter in parameters}
    own |= {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return sum(tensor.nbytes for tensor in held_tensors(optimizer) if id(tensor) not in own)
