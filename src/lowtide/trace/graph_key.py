"""What decides what AOTAutograd makes of a Dynamo graph: of two with the same key it makes the same.

torch traces a function again when anything changes that its code has read: a counter, a setting that the
first call fills in. Often the graph is the same as before.
"""

import dataclasses
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from lowtide.torch_compat import dispatch
from lowtide.torch_compat.dispatch import storage_key


class _NoKey(Exception):
    """A graph has something that cannot be compared."""


def key_of(graph: fx.GraphModule) -> Hashable | None:
    """A key of a Dynamo graph in the current setting; None where there is none."""
    numbers: dict[fx.Node, int] = {}
    storages: dict[int, int] = {}
    try:
        nodes = []
        for node in graph.graph.nodes:
            nodes.append(_node_key(node, numbers, storages))
            numbers[node] = len(numbers)
    except _NoKey:
        return None
    return (*nodes, *_setting())


def _node_key(node: fx.Node, numbers: dict[fx.Node, int], storages: dict[int, int]) -> Hashable:
    if node.op == "placeholder":
        return _input_key(node, storages)
    if node.op not in ("call_function", "call_method", "output"):
        raise _NoKey  # a module or a constant inside of the graph
    return node.op, node.target, _freeze(node.args, numbers), _freeze(node.kwargs, numbers)


def _input_key(node: fx.Node, storages: dict[int, int]) -> Hashable:
    value = node.meta.get("example_value")
    grapharg = node.meta.get("grapharg")
    example = None if grapharg is None else grapharg.example
    if not isinstance(value, torch.Tensor) or not isinstance(example, torch.Tensor):
        raise _NoKey
    if grapharg is not None and grapharg.pass_arg_as_tensor:
        raise _NoKey  # a number, of which torch may have found out more than the graph says
    if type(example) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        raise _NoKey
    return (
        str(node.target),
        type(example),
        id(example) if isinstance(example, torch.nn.Parameter) else 0,
        storages.setdefault(storage_key(example), len(storages)),
        _freeze((*value.shape, *value.stride(), value.storage_offset()), {}),
        value.dtype,
        value.device,
        value.requires_grad,
        example.is_leaf,
    )


def _freeze(value: Any, numbers: dict[fx.Node, int]) -> Hashable:
    """An argument as something that can be compared; the type tells 1 from 1.0 and from True."""
    if isinstance(value, fx.Node):
        return "node", numbers[value]
    if isinstance(value, tuple | list):
        return type(value), *(_freeze(item, numbers) for item in value)
    if isinstance(value, dict):
        return dict, *((key, _freeze(item, numbers)) for key, item in value.items())
    if isinstance(value, slice):
        return slice, *(_freeze(item, numbers) for item in (value.start, value.stop, value.step))
    if isinstance(value, float):
        return float, value.hex()
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | torch.Tensor):
        raise _NoKey
    if dataclasses.is_dataclass(value) or value.__hash__ is None:
        raise _NoKey
    return type(value), value


def _setting() -> tuple[Hashable, ...]:
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        dispatch.dispatch_state(),
        dispatch.onednn_is_enabled(),
        torch.is_autocast_cache_enabled(),
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
    )
