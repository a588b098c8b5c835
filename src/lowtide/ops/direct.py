"""A graph as a Python function that calls its ops directly.

torch's code of a graph says `torch.ops.aten.mm.default(...)`: four lookups, a call in Python, and arguments
read by a schema. Where ops are small, that is a tenth of a step's time. The same ops have functions and
methods for users, which read their arguments faster. A graph of two ops becomes:

    def forward(inputs):
        v_x, = inputs; inputs.clear()
        v_neg = op_0(v_x)
        v_mul = op_1(v_neg, v_x); del v_neg, v_x
        return [v_mul]
"""

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.ops.in_place import write_over, writer
from lowtide.torch_compat.aot_autograd import function_from
from lowtide.torch_compat.dispatch import OpOverload, bare_op

aten = torch.ops.aten

DIRECT: dict[OpOverload[..., Any], Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.clone.default: torch.clone,
    aten.detach.default: Tensor.detach,
    aten.div.Tensor: torch.div,
    aten.embedding.default: torch.embedding,
    aten.expand.default: Tensor.expand,
    aten.gelu.default: torch.nn.functional.gelu,
    aten.mean.dim: torch.mean,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.neg.default: torch.neg,
    aten.permute.default: torch.permute,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.relu.default: torch.relu,
    aten.reshape.default: Tensor.reshape,
    aten.rsqrt.default: torch.rsqrt,
    aten.select.int: torch.select,
    aten.sub.Tensor: torch.sub,
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: Tensor.t,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
}
"""Functions that take exactly the arguments of an op, and run only that op."""


def direct_function(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """A graph as a plain function. It empties its list of inputs, so that each input is freed at its last
    use. Runs the graph op by op."""
    return _compiled(module)


def direct_parts(module: fx.GraphModule) -> Callable[[list[Any]], Iterator[None]]:
    """A graph that calls `hand_over`, as a generator. Each advance runs to the next such call. The generator
    drops its references to the values that it handed over."""
    return _compiled(module)


def hand_over(box: list[Any], *values: Any) -> None:
    """An op of graphs that run in parts: the values leave the graph, and the graph pauses."""
    box.extend(values)


def _compiled(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    nodes = list(module.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    last_use = {source: node for node in nodes for source in (node, *node.all_input_nodes)}
    done_after: dict[fx.Node, list[str]] = {}
    for source, last in last_use.items():
        done_after.setdefault(last, []).append(f"v_{source.name}")
    names: dict[str, Any] = {}
    lines = [f"{_text(tuple(inputs), names)} = inputs; inputs.clear()"]
    for node in nodes:
        line = "pass"
        if node.op == "output":
            lines.append(f"return {_text(node.args[0], names)}")
            break
        if node.op == "get_attr":
            value = functools.reduce(getattr, str(node.target).split("."), module)
            line = f"v_{node.name} = {_named(value, names)}"
        elif node.target is operator.getitem:
            line = f"v_{node.name} = {_text(node.args[0], names)}[{_text(node.args[1], names)}]"
        elif node.op == "call_function":
            target, args = _direct(node.target), node.args
            if target is write_over:
                target, args = writer(args[0], args[1]), args[2:]
            given = [_text(arg, names) for arg in args]
            given += [f"{key}={_text(value, names)}" for key, value in node.kwargs.items()]
            line = f"v_{node.name} = {_named(target, names)}({', '.join(given)})"
        gone = f"; del {', '.join(done_after[node])}" if node in done_after else ""
        lines.append(line + gone + ("; yield" if node.target is hand_over else ""))
    return function_from("\n    ".join(("def forward(inputs):", *lines)), names)


def _text(value: Any, names: dict[str, Any]) -> str:
    """The code of an argument; values without a literal go to `names`."""
    if isinstance(value, fx.Node):
        return f"v_{value.name}"
    if isinstance(value, tuple):
        return f"({''.join(f'{_text(item, names)}, ' for item in value)})"
    if isinstance(value, list):
        return f"[{', '.join(_text(item, names) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_text(item, names)}' for key, item in value.items())}}}"
    if isinstance(value, slice):
        return f"slice{_text((value.start, value.stop, value.step), names)}"
    return repr(value) if value is None or type(value) in (int, bool, str) else _named(value, names)


def _named(value: Any, names: dict[str, Any]) -> str:
    """A global name for an op or a constant."""
    name = f"op_{len(names)}" if callable(value) else f"constant_{len(names)}"
    names[name] = value
    return name


def _direct(op: Any) -> Any:
    return DIRECT.get(op, bare_op(op)) if isinstance(op, OpOverload) else op
