"""One call of an op, known by the layout of its tensors and never by their values, and its cost.

Shortcomings: sizes must be plain ints; a call with symbolic sizes has a signature but no sample.
"""

import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.torch_compat.dispatch import is_number, iter_tensors, storage_key

Target = Callable[..., Any]

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True, eq=False)
class Call:
    """`target(*args, **kwargs)`; only layout, dtype and device of its tensors matter.

    Tensors may be fake and may be nested in lists, tuples and dicts, as for foreach ops.
    """

    target: Target
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, in order, each as often as it occurs."""
        return list(iter_tensors((self.args, self.kwargs)))


@dataclass(frozen=True, slots=True)
class OpCost:
    """The cost of one call.

    `workspace_bytes` are live inside the op beyond its own fresh outputs. `estimated` marks costs
    scaled from another call, or taken from the bytes alone. `hidden_bytes`: how much larger the
    storage of each fresh output is than its fake one; empty for almost all ops, where the sizes agree.
    """

    seconds: float
    workspace_bytes: int
    estimated: bool
    hidden_bytes: tuple[int, ...] = ()


def call_of(node: fx.Node, values: Mapping[fx.Node, Any] | None = None) -> Call:
    """The call that a `call_function` node makes, from `values`, else the `val` that its inputs carry."""
    if node.op != "call_function":
        raise ValueError(f"node '{node.name}' calls no function: it is a {node.op}")
    known = values or {}
    args, kwargs = fx.node.map_arg(
        (node.args, node.kwargs), lambda read: known[read] if read in known else value_of(read)
    )
    assert callable(node.target)
    return Call(node.target, tuple(args), dict(kwargs))


def value_of(node: fx.Node) -> Any:
    """The fake value that a node was captured with; a symbolic number becomes its captured value."""
    value: Any = node.meta.get("val")
    return value.node.hint if is_number(value) else value


def target_name(target: Any) -> str:
    """An op's name, the same in every process: `aten.mm.default`, or a function's name with its library.

    Python's own text for a function contains a memory address.
    """
    if isinstance(target, types.FunctionType | types.BuiltinFunctionType):
        return f"{str(target.__module__).split('.')[0].lstrip('_')}.{target.__qualname__}"
    return _ADDRESS.sub("", str(target))


def span_elements(tensor: Tensor) -> int:
    """Number of storage elements from the tensor's first to its last."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def storages_bytes(tensors: list[Tensor]) -> int:
    """Bytes that a real copy of the tensors needs; each storage counts once."""
    low: dict[int, int] = {}
    high: dict[int, int] = {}
    for tensor in tensors:
        key, start = storage_key(tensor), int(tensor.storage_offset()) * tensor.itemsize
        stop = start + span_elements(tensor) * tensor.itemsize
        low[key] = min(low.get(key, start), start)
        high[key] = max(high.get(key, stop), stop)
    return sum(high[key] - low[key] for key in low)


def signature(call: Call) -> str:
    """Text that is equal for two calls exactly when they cost the same: layouts, never values.

    `=0` marks a tensor that shares its storage with tensor 0 of the same call: to read one storage twice is
    cheaper than to read two. Devices of one kind cost the same: their index is left out.
    """
    seen: dict[int, int] = {}

    def leaf(value: Any) -> str:
        if isinstance(value, Tensor):
            key = storage_key(value)
            shared = f"={seen[key]}" if key in seen else ""
            seen.setdefault(key, len(seen))
            sizes, steps = ",".join(map(str, value.shape)), ",".join(map(str, value.stride()))
            kind = f"{str(value.dtype).removeprefix('torch.')}{'*' if value.is_conj() else ''}"
            return f"{kind}[{sizes}]({steps}){value.device.type}{shared}"
        if isinstance(value, torch.device):
            return value.type
        return _ADDRESS.sub("", repr(value))

    def text(value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(text, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key}={text(item)}' for key, item in value.items())}}}"
        return leaf(value)

    parts = [text(arg) for arg in call.args]
    parts += [f"{key}={text(call.kwargs[key])}" for key in sorted(call.kwargs)]
    return f"{target_name(call.target)}({', '.join(parts)})"
