"""Private attributes of modules and optimizers: what a call of a module runs, and hooks around both."""

import contextlib
import unittest.mock
from collections import OrderedDict
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import nn

from lowtide.torch_compat.dispatch import FakeTensor

Optimizer = torch.optim.Optimizer
ROUTE = "_compiled_call_impl"
"""The attribute of a module that is called in place of the module's own code."""


def call_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The model's own code, hooks included. Capture and training both compile this function, so that both get
    the same graphs."""
    return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def own_call(module: nn.Module) -> Callable[..., Any]:
    """The module's own code as a function of its arguments, hooks included."""
    call: Callable[..., Any] = module._call_impl
    return call


def has_hooks_before_forward(module: nn.Module) -> bool:
    return bool(module._forward_pre_hooks)


def route_of(model: nn.Module) -> Any:
    """The function that runs instead of the model's own code, or None."""
    return model._compiled_call_impl


def set_route(model: nn.Module, route: Any) -> None:
    """Let `route` run instead of the model's own code; None restores the model's own."""
    model._compiled_call_impl = route


def is_compiled(model: nn.Module) -> bool:
    """Whether something runs instead of the model's own code, or torch.compile instead of its forward."""
    return route_of(model) is not None or hasattr(vars(model).get("forward"), "_torchdynamo_orig_callable")


def forget_step_hooks(optimizer: Optimizer) -> None:
    """Drop the hooks around an optimizer's `step()`."""
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()


def hooks_before_step(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """The hooks that run before an optimizer's `step()`, in order."""
    return list(optimizer._optimizer_step_pre_hooks.values())


def foreach_devices() -> tuple[str, ...]:
    """The device types on which optimizers take `foreach` by default; `stepping_as_real` changes them."""
    torchs: Any = import_module(Optimizer.__module__)
    return tuple(torchs._get_foreach_kernels_supported_devices())


@contextlib.contextmanager
def stepping_as_real(*, on_gpu: bool) -> Iterator[None]:
    """Let optimizers over fake tensors choose between a loop and `foreach` as over real tensors; with
    `on_gpu`, as over tensors of a GPU. torch decides by the class and the device of parameters."""
    torchs: Any = import_module(Optimizer.__module__)
    devices = [*foreach_devices(), *(["cpu"] if on_gpu else [])]
    with unittest.mock.patch.multiple(
        torchs,
        _foreach_supported_types=[*torchs._foreach_supported_types, FakeTensor],
        _get_foreach_kernels_supported_devices=lambda: devices,
    ):
        yield
