"""What is private in modules and optimizers: what a call of a module runs, hooks around both, and stand-ins
for the hooks of a backward pass."""

import contextlib
import threading
import unittest.mock
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.nn.modules import module as torchs_modules

from lowtide.torch_compat.autograd_engine import hook_tables
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


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of `module` runs more than its forward."""
    own = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    return any(own) or bool(torchs_modules._has_any_global_hook())  # type: ignore[no-untyped-call]


def route_of(model: nn.Module) -> Any:
    """The function that runs instead of the model's own code, or None."""
    return model._compiled_call_impl


def set_route(model: nn.Module, route: Any) -> None:
    """Let `route` run instead of the model's own code; None restores the model's own.

    Written past the `__setattr__` of the model's class: a wrapper's may hand attributes on to the module
    inside, which would then call the wrapper.
    """
    if route is None:
        vars(model).pop(ROUTE, None)
    else:
        vars(model)[ROUTE] = route


def runs_own_code(route: Any) -> bool:
    """Whether a route ends in the model's own code: it only looks at the calls, and says so itself."""
    return route is None or getattr(route, "runs_own_code", False)


def is_compiled(model: nn.Module) -> bool:
    """Whether something runs instead of the model's own code, or torch.compile instead of its forward."""
    return not runs_own_code(route_of(model)) or hasattr(
        vars(model).get("forward"), "_torchdynamo_orig_callable"
    )


Meeting = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


@contextlib.contextmanager
def calls_and_optimizers_seen(
    meet: Meeting, made: Callable[[Optimizer], None]
) -> Iterator[Callable[[], None]]:
    """Let `meet` see each outermost call of a module in this process before it runs, `made` each optimizer
    that is constructed. Yields a function that ends both at once; the end of the block does so, too.

    Code that torch.compile traces is not seen.
    """
    call, construct = nn.Module.__call__, Optimizer.__init__
    inside = threading.local()

    def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or getattr(inside, "a_call", False):
            return call(module, *args, **kwargs)
        inside.a_call = True
        try:
            meet(module, args, kwargs)
            return nn.Module.__call__(module, *args, **kwargs)
        finally:
            inside.a_call = False

    def __init__(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        construct(optimizer, *args, **kwargs)
        made(optimizer)

    def restore() -> None:
        nn.Module.__call__ = call  # type: ignore[method-assign]
        Optimizer.__init__ = construct  # type: ignore[method-assign]

    nn.Module.__call__ = __call__  # type: ignore[method-assign]
    Optimizer.__init__ = __init__  # type: ignore[method-assign, assignment]
    try:
        yield restore
    finally:
        restore()


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
def global_step_hooks_off() -> Iterator[None]:
    """No hook that is registered for all optimizers sees the steps of the block, which no loop takes."""
    torchs: Any = import_module(Optimizer.__module__)
    with unittest.mock.patch.multiple(
        torchs, _global_optimizer_pre_hooks={}, _global_optimizer_post_hooks={}
    ):
        yield


@contextlib.contextmanager
def stepping_as_real(*, on_gpu: bool) -> Iterator[None]:
    """Let optimizers over fake tensors choose between a loop and `foreach` as over real tensors; with
    `on_gpu`, as over tensors of a GPU. torch decides by the class and the device of parameters. Hooks of all
    optimizers see none of these steps."""
    torchs: Any = import_module(Optimizer.__module__)
    devices = [*foreach_devices(), *(["cpu"] if on_gpu else [])]
    with (
        global_step_hooks_off(),
        unittest.mock.patch.multiple(
            torchs,
            _foreach_supported_types=[*torchs._foreach_supported_types, FakeTensor],
            _get_foreach_kernels_supported_devices=lambda: devices,
        ),
    ):
        yield


Table = MutableMapping[int, Callable[..., Any]]
REGISTERS = ("register_hook", "register_post_accumulate_grad_hook")
"""The methods of a tensor that register a hook."""


def forward_hooks(model: nn.Module) -> list[Callable[..., Any]]:
    """The hooks that are called before and after the forward of the modules of `model`."""
    tables: list[Any] = [torchs_modules._global_forward_pre_hooks, torchs_modules._global_forward_hooks]
    for module in model.modules():
        tables += [module._forward_pre_hooks, module._forward_hooks]
    return [hook for table in tables for hook in table.values()]


def _backward_tables(model: nn.Module) -> list[Table]:
    tables: list[Any] = [torchs_modules._global_backward_pre_hooks, torchs_modules._global_backward_hooks]
    for module in model.modules():
        tables += [module._backward_pre_hooks, module._backward_hooks]
    return tables


def has_backward_hooks(model: nn.Module) -> bool:
    """Whether a hook waits for the gradients of the modules of `model`."""
    return any(_backward_tables(model))


@contextlib.contextmanager
def backward_hooks_replaced(
    model: nn.Module, tensors: Iterable[Tensor], stand_in: Callable[..., None]
) -> Iterator[None]:
    """Let `stand_in` run in the place of each hook of a backward pass: hooks of the modules of `model`, of
    all modules, of `tensors`, and hooks that the code inside registers on any tensor.

    Hooks that torch traces into a graph stay. At the end all tables of hooks are as before.
    """
    tensors = tuple(tensors)
    tables = [*_backward_tables(model), *(table for tensor in tensors for table in hook_tables(tensor))]
    before = [(table, dict(table)) for table in tables]
    known = {id(table) for table in tables}
    thread = threading.get_ident()

    def registering(original: Callable[..., Any]) -> Callable[..., Any]:
        def register(tensor: Tensor, hook: Callable[..., Any]) -> Any:
            is_ours = threading.get_ident() == thread and TracingContext.try_get() is None
            return original(tensor, stand_in if is_ours else hook)

        return register

    try:
        for table in tables:
            table.update(dict.fromkeys(table, stand_in))
        with contextlib.ExitStack() as stack:
            for name in REGISTERS:
                method = registering(getattr(Tensor, name))
                stack.enter_context(unittest.mock.patch.object(torch.Tensor, name, method))
            yield
    finally:
        for table, hooks in before:
            table.clear()
            table.update(hooks)
        for tensor in tensors:  # tables that the first hook of a tensor made
            for table in hook_tables(tensor):
                if id(table) not in known:
                    table.clear()
