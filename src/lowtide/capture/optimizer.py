"""The third region of a step: what the optimizer allocates, op by op, traced on fake tensors.

The optimizer's own Python code runs on fake copies of the parameters, so temporaries live exactly as
long as that code holds them, for loops, foreach and fused variants alike.
"""

import copy
import warnings
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lowtide.errors import CaptureError
from lowtide.torchside.calls import storage_key
from lowtide.torchside.hooks import (
    FakeTensor,
    FakeTensorMode,
    StorageWeakRef,
    TorchDispatchMode,
    forget_step_hooks,
)

Optimizer = torch.optim.Optimizer


@dataclass(slots=True)
class OptimizerOp:
    """One op of `optimizer.step()`: storages (by key) it reads, makes and, after it, frees."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    frees: tuple[int, ...] = ()


@dataclass(slots=True)
class OptimizerTrace:
    """`sizes` are bytes by storage key (temporaries have negative keys); the rest says what keys are.

    `parameters` and `gradients` give the identity of the user's parameter.
    """

    ops: list[OptimizerOp]
    sizes: dict[int, int]
    state: tuple[int, ...]
    parameters: dict[int, int]
    gradients: dict[int, int]


class _Recorder(TorchDispatchMode):
    """Record every op on fake tensors; ops on the small real ones (step counters) just run."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode
        self.ops: list[OptimizerOp] = []
        self.sizes: dict[int, int] = {}
        self._live: dict[int, tuple[int, StorageWeakRef]] = {}
        self._layout: dict[Any, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = _fakes((args, kwargs))
        if not inputs or func.namespace == "prim":
            return func(*args, **kwargs)
        self.collect()
        held = {storage_key(tensor) for tensor in inputs}
        reads = tuple(dict.fromkeys(self._name(storage_key(tensor)) for tensor in inputs))
        result = func(*args, **kwargs)
        makes = []
        for tensor in _fakes(result):
            key = storage_key(tensor)
            if key not in held and key not in self._live:
                # torch reuses the addresses of what died, so temporaries get names of their own
                name = -1 - len(self.sizes)
                self._live[key] = (name, StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
                self.sizes[name] = tensor.untyped_storage().nbytes()
                makes.append(name)
        args, kwargs = self._layouts((args, kwargs))
        self.ops.append(OptimizerOp(func, args, kwargs, reads, tuple(makes)))
        return result

    def _layouts(self, tree: Any) -> Any:
        """Arguments with tensors of their layout instead, so that recording keeps no temporary alive."""

        def plain(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            key = (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
            if key not in self._layout:
                with self.mode:
                    self._layout[key] = torch.empty_strided(*key[:2], dtype=leaf.dtype, device=leaf.device)
            return self._layout[key]

        return pytree.tree_map(plain, tree)

    def _name(self, key: int) -> int:
        return self._live[key][0] if key in self._live else key

    def collect(self) -> None:
        """Note what died since the last op."""
        dead = [key for key, (_, reference) in self._live.items() if reference.expired()]  # type: ignore[no-untyped-call]
        names = tuple(self._live.pop(key)[0] for key in dead)
        if names:
            self.ops[-1].frees = (*self.ops[-1].frees, *names)


def trace_optimizer(optimizer: Optimizer, gradients: Container[int]) -> OptimizerTrace:
    """Trace the second step of `optimizer` (its state already there).

    `gradients` has the identities of the parameters that get one.
    """
    optimizer = _unwrapped(optimizer)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, torch.Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            fakes[id(parameter)] = _fake_parameter(parameter, mode)
    try:
        double = _double(optimizer, fakes, mode)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            _give_gradients(fakes, gradients)
            double.step()
            kept = _state_tensors(double)
            recorder = _Recorder(mode)
            with recorder:
                double.step()
                recorder.collect()
    except Exception as error:
        raise CaptureError(
            f"cannot trace {type(optimizer).__name__}.step(): {error}. "
            "Leave the optimizer out (`optimizer=None`) to plan for forward and backward alone"
        ) from error
    if not recorder.ops and any(fake.grad is not None for fake in fakes.values()):
        raise CaptureError(
            f"{type(optimizer).__name__}.step() does nothing with the parameters that it is given: "
            "leave the optimizer out (`optimizer=None`) to plan for forward and backward alone"
        )
    sizes = dict(recorder.sizes)
    for tensor in kept:
        sizes[storage_key(tensor)] = tensor.untyped_storage().nbytes()
    parameters = {storage_key(fake): key for key, fake in fakes.items()}
    grads = {storage_key(fake.grad): key for key, fake in fakes.items() if fake.grad is not None}
    return OptimizerTrace(
        ops=recorder.ops,
        sizes=sizes,
        state=tuple(dict.fromkeys(storage_key(tensor) for tensor in kept)),
        parameters=parameters,
        gradients=grads,
    )


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer behind one that only passes on what it is asked, as accelerate's does."""
    inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    if not inner:
        return optimizer
    if isinstance(getattr(type(optimizer), "param_groups", None), property) and len(inner) == 1:
        return _unwrapped(inner[0])
    raise CaptureError(
        f"{type(optimizer).__name__} works through another optimizer, {type(inner[0]).__name__}, and what "
        "it holds besides cannot be told: pass that one as `optimizer=`, and leave room in the budget"
    )


def _fake_parameter(parameter: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        fake = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
    return fake.requires_grad_(parameter.requires_grad)


def _give_gradients(fakes: dict[int, torch.Tensor], gradients: Container[int]) -> None:
    for key, fake in fakes.items():
        if key in gradients:
            fake.grad = torch.empty_like(fake, requires_grad=False)


def _double(optimizer: Optimizer, fakes: dict[int, torch.Tensor], mode: FakeTensorMode) -> Optimizer:
    """The same optimizer over fake parameters; the user's own is not touched."""
    double = copy.copy(optimizer)
    double.__dict__ = dict(optimizer.__dict__)
    double.param_groups = [
        {**group, "params": [fakes[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    state: Any = type(optimizer.state)(dict)
    for parameter, values in optimizer.state.items():
        state[fakes[id(parameter)]] = {
            name: _fake_parameter(value, mode)
            if isinstance(value, torch.Tensor) and value.dim()
            else copy.copy(value.clone() if isinstance(value, torch.Tensor) else value)
            for name, value in values.items()
        }
    double.state = state
    # a learning-rate scheduler counts calls by wrapping `step` on the instance
    double.__dict__.pop("step", None)
    forget_step_hooks(double)
    return double


def _state_tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    return [
        value
        for values in optimizer.state.values()
        for value in pytree.tree_leaves(dict(values))
        if isinstance(value, torch.Tensor)
    ]


def _fakes(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, FakeTensor)]
