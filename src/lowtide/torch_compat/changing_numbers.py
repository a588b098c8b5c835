"""Let a Python number that changes from call to call be an input of a graph, not a graph for each value.

A number gets there with its second value: most stay as they are, and a constant is the simpler graph. The
graph reads the number out of its input and hands it to its ops as Python would, and what is computed with
numbers alone is computed by Python, op by op: so all has eager's bits. Where a number decides more than
values, such as a shape or which ops there are, it is fixed: tracing starts over, and every value is a graph
of its own. Like `dynamo`, one of the files to read when torch changes.

Shortcomings: torch reads a number that an op takes as a `float` of C (`huber_loss`, `bernoulli_`), and such a
number is fixed; `ops.by_number` knows a few that are not.
"""

import contextlib
import math
import unittest.mock
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CodeType
from typing import Any

import torch
from torch import fx
from torch._dynamo import config
from torch._dynamo.exc import TensorifyScalarRestartAnalysis, TorchDynamoException
from torch._dynamo.source import is_constant_source, is_from_defaults
from torch._dynamo.variables.builder import VariableBuilder
from torch._functorch._aot_autograd import graph_compile
from torch.fx.experimental.symbolic_shapes import DimDynamic

from lowtide.torch_compat.dispatch import is_number, iter_tensors

_first: weakref.WeakKeyDictionary[CodeType, dict[str, int | float]] = weakref.WeakKeyDictionary()
"""The first value of every number that a function was traced with, by where it is found."""
_fixed: weakref.WeakKeyDictionary[CodeType, set[str]] = weakref.WeakKeyDictionary()
"""Those that are no inputs, whatever their values."""
_inputs: weakref.WeakKeyDictionary[CodeType, dict[str, Any]] = weakref.WeakKeyDictionary()
"""Those that the tracing at hand made inputs of, each with torch's symbol for it."""


@contextlib.contextmanager
def changing_numbers() -> Iterator[None]:
    """While torch traces, make inputs of numbers that have changed since it last traced the same code."""
    wrap = _wrapped_by(VariableBuilder.wrap_literal)
    with (
        unittest.mock.patch.object(VariableBuilder, "wrap_literal", wrap),
        # with its assertions torch writes numbers anew by their formulas, simplified, which rounds otherwise
        config.patch(do_not_emit_runtime_asserts=True),
    ):
        yield


def _wrapped_by(plain: Callable[..., Any]) -> Callable[..., Any]:
    def wrap_literal(builder: Any, value: Any) -> Any:
        if not _has_changed(builder, value):
            return plain(builder, value)
        if type(value) is int:
            made = builder.wrap_symint(value, dynamism=DimDynamic.DYNAMIC)
        else:
            with config.patch(assume_static_by_default=False):
                made = plain(builder, value)
        symbol = getattr(made, "sym_num", None)
        if is_number(symbol):
            _note(_code_of(builder), builder.source.name, symbol)
        return made

    return wrap_literal


def _note(code: CodeType, name: str, symbol: Any) -> None:
    noted = _inputs.setdefault(code, {})
    if any(other.node.shape_env is not symbol.node.shape_env for other in noted.values()):
        noted.clear()  # of a tracing that was given up
    noted[name] = symbol


def _code_of(builder: Any) -> CodeType:
    code: CodeType = builder.tx.output.root_tx.f_code
    return code


def _has_changed(builder: Any, value: Any) -> bool:
    source = builder.source
    if type(value) not in (int, float) or is_constant_source(source) or is_from_defaults(source):
        return False
    code, name = _code_of(builder), source.name
    if not math.isfinite(value) or not name.startswith("L[") or name in _fixed.get(code, ()):
        return False
    first = _first.setdefault(code, {}).setdefault(name, value)
    return type(first) is type(value) and first != value


def compiled_with_numbers(
    graph: fx.GraphModule,
    code: CodeType,
    compile_graph: Callable[[], Callable[..., Any]],
    *,
    allowed: bool,
) -> Callable[..., Any]:
    """What `compile_graph` makes of a graph of `code`, with numbers among its inputs; where none are
    `allowed`, they decide more than they may, or torch fails on them, tracing starts over without those."""
    numbers = _inputs.pop(code, {})
    if not numbers:
        return compile_graph()
    if not allowed:
        _fix(code, numbers)

    def look(joint: fx.GraphModule) -> None:
        _fix(code, _deciding(numbers, joint, "val"))

    _fix(code, _deciding(numbers, graph, "example_value"))
    try:
        # torch would make tensors of numbers here, which round otherwise, and fix the rest
        with unittest.mock.patch.object(graph_compile, "_apply_tensorify_python_scalars", look):
            return compile_graph()
    except TorchDynamoException:
        raise
    except RuntimeError:
        _fix(code, numbers)
        raise


def _fix(code: CodeType, names: Collection[str]) -> None:
    """Start over without these numbers among the inputs, if there are any."""
    if names:
        _fixed.setdefault(code, set()).update(names)
        raise TensorifyScalarRestartAnalysis(
            restart_reason="a number decides more than it may as an input"
        ) from None


def _deciding(numbers: Mapping[str, Any], graph: fx.GraphModule, field: str) -> list[str]:
    """Those of a graph's numbers that torch could only go on with by taking them for their values, or that
    decide the layout of a tensor, or the type of a number."""
    symbols: set[Any] = set()
    for node in graph.graph.nodes:
        value = node.meta.get(field)
        for tensor in iter_tensors(value):
            layout = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
            symbols.update(*(number.node.expr.free_symbols for number in layout if is_number(number)))
        # of 1 and 0.5 torch makes 1.0 where Python takes 1
        mixes = (
            node.target in (torch.sym_min, torch.sym_max) and len({_kind(a, field) for a in node.args}) > 1
        )
        if mixes and _tells_types_apart(node, field):
            symbols |= value.node.expr.free_symbols if is_number(value) else set()
    return [
        name
        for name, symbol in numbers.items()
        if not symbol.node.expr.free_symbols or symbol.node.expr.free_symbols & symbols
    ]


def _kind(arg: Any, field: str) -> type:
    value = arg.meta.get(field) if isinstance(arg, fx.Node) else arg
    return int if isinstance(value, int | torch.SymInt) else float


def _tells_types_apart(number: fx.Node, field: str) -> bool:
    """Whether it matters that a number is 1 or 1.0: not to ops on tensors of floats."""
    for reader in number.users:
        if is_number(reader.meta.get(field)):
            if _tells_types_apart(reader, field):
                return True
        else:
            read = [source.meta.get(field) for source in reader.all_input_nodes]
            floats = [tensor.is_floating_point() for tensor in read if isinstance(tensor, torch.Tensor)]
            if reader.op == "output" or not any(floats):
                return True
    return False
