"""The user's hooks, in the tables of modules, of tensors and of torch itself, and a context in which a
stand-in runs in the place of each hook of a backward pass."""

import contextlib
import threading
import unittest.mock
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.nn.modules import module as torchs

from lowtide.torch_compat.autograd_engine import hook_tables

Table = MutableMapping[int, Callable[..., Any]]
REGISTERS = ("register_hook", "register_post_accumulate_grad_hook")
"""The methods of a tensor that register a hook."""


def forward_hooks(model: nn.Module) -> list[Callable[..., Any]]:
    """The hooks that are called before and after the forward of the modules of `model`."""
    tables: list[Any] = [torchs._global_forward_pre_hooks, torchs._global_forward_hooks]
    for module in model.modules():
        tables += [module._forward_pre_hooks, module._forward_hooks]
    return [hook for table in tables for hook in table.values()]


def _backward_tables(model: nn.Module) -> list[Table]:
    tables: list[Any] = [torchs._global_backward_pre_hooks, torchs._global_backward_hooks]
    for module in model.modules():
        tables += [module._backward_pre_hooks, module._backward_hooks]
    return tables


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
