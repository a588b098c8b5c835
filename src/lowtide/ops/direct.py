"""A graph as a function that calls its ops directly.

torch writes `torch.ops.aten.mm.default(...)` into the code of a graph: four lookups and a call in Python
around every op, and then arguments read by a schema. Where ops are small, a step spends a tenth of its
time so. The same ops have functions and methods for users, which read their arguments faster.
"""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.torch_compat.aot_autograd import boxed_code, function_from
from lowtide.torch_compat.dispatch import OpOverload, bare_op

aten = torch.ops.aten

DIRECT: dict[OpOverload[..., Any], Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.clone.default: torch.clone,
    aten.detach.default: Tensor.detach,
    aten.expand.default: Tensor.expand,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.permute.default: torch.permute,
    aten.relu.default: torch.relu,
    aten.reshape.default: Tensor.reshape,
    aten.rsqrt.default: torch.rsqrt,
    aten.t.default: Tensor.t,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
}
"""Functions that take the arguments of an op as they are, and run that op and no other."""

_OP = re.compile(r"\btorch\.ops\.(\w+\.\w+\.\w+)\(")


def direct_function(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """A graph as a plain function: it takes its inputs as one list that it empties, so that each is freed
    at its last use. Computes what the graph does, op by op."""
    run = _written(module)

    def call(args: list[Any]) -> Any:
        return run(module, args)

    return call


def hand_over(box: list[Any], *values: Any) -> None:
    """An op of graphs that run in parts: the values leave the graph, and it waits."""
    box.extend(values)


def direct_parts(module: fx.GraphModule) -> Callable[[list[Any]], Iterator[None]]:
    """Like `direct_function`, for a graph that calls `hand_over`: it runs up to the next such call each time
    that it is asked to, and holds no value that was handed over."""
    run = _written(module, lambda line: f"{line}; yield" if f"{hand_over.__name__}(" in line else line)

    def call(args: list[Any]) -> Iterator[None]:
        parts: Iterator[None] = run(module, args)
        return parts

    return call


def _written(module: fx.GraphModule, change: Callable[[str], str] = str) -> Callable[..., Any]:
    """The code of a graph, each line of it changed, as a function of its module and of a list of inputs."""
    code = boxed_code(module.graph)
    names: dict[str, Any] = dict(code.globals)

    def call_by_name(match: re.Match[str]) -> str:
        name = "op_" + match[1].replace(".", "_")
        names[name] = _direct(functools.reduce(getattr, match[1].split("."), torch.ops))
        return f"{name}("

    source = "\n".join(change(line) for line in _OP.sub(call_by_name, code.src).split("\n"))
    return function_from(source, names)


def _direct(op: Any) -> Any:
    if not isinstance(op, OpOverload):
        return op
    return DIRECT.get(op, bare_op(op))
