"""Let a Python number that changes from call to call be an input of a graph, not a graph for each value.

A number gets there with its second value: most stay as they are, and a constant is the simpler graph. torch
turns a float into an input of one element and computes with that, which gives the same bits as the number
itself where a tensor is added to it, subtracted, multiplied or divided by it, and so does one such op of two
numbers. Whole numbers may be counted, compared and returned. Where a number decides more than that, such as
a shape, it is fixed: tracing starts over, and every value is a graph of its own. Like `dynamo`, one of the
files to read when torch changes.
"""

import contextlib
import math
import operator
import unittest.mock
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import fx
from torch._dynamo import config
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.source import is_constant_source, is_from_defaults
from torch._dynamo.symbolic_convert import TensorifyState
from torch._dynamo.variables.builder import VariableBuilder
from torch.fx.experimental.symbolic_shapes import DimDynamic

from lowtide.torchside.calls import iter_tensors

EXACT = {operator.add, operator.sub, operator.mul, operator.truediv, operator.neg}
"""What a processor rounds as Python does."""
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)

_first: weakref.WeakKeyDictionary[CodeType, dict[str, int | float]] = weakref.WeakKeyDictionary()
"""The first value of every number that a function was traced with, by where it is found."""
_fixed: weakref.WeakKeyDictionary[CodeType, set[str]] = weakref.WeakKeyDictionary()
"""Those that are no inputs, whatever their values."""


@contextlib.contextmanager
def changing_numbers() -> Iterator[None]:
    """While torch traces, make inputs of numbers that have changed since it last traced the same code."""
    wrap = _wrapped_by(VariableBuilder.wrap_literal)
    with unittest.mock.patch.object(VariableBuilder, "wrap_literal", wrap):
        yield


def _wrapped_by(plain: Callable[..., Any]) -> Callable[..., Any]:
    def wrap_literal(builder: Any, value: Any) -> Any:
        if not _has_changed(builder, value):
            return plain(builder, value)
        if type(value) is int:
            return builder.wrap_symint(value, dynamism=DimDynamic.DYNAMIC)
        with config.patch(assume_static_by_default=False):
            made = plain(builder, value)
        symbol = getattr(made, "sym_num", None)
        if symbol is not None and TensorifyState.should_specialize(str(symbol.node._expr)):
            _fix(_code_of(builder), builder.source.name)
        return made

    return wrap_literal


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


def _fix(code: CodeType, name: str) -> None:
    _fixed.setdefault(code, set()).add(name)


def fix_what_decides_more(graph: fx.GraphModule, code: CodeType) -> None:
    """Asked with every graph of `code`: start over with fixed numbers where they decide more than that."""
    numbers = [node for node in graph.graph.find_nodes(op="placeholder") if _is_number(node)]
    if numbers and not all(map(_may_stay, graph.graph.nodes)):
        for node in numbers:
            _fix(code, node.meta["grapharg"].source.name)
        raise TensorifyScalarRestartAnalysis(restart_reason="a number decides more than it may as an input")


def _is_number(node: fx.Node) -> bool:
    """Whether an input was a number of Python: torch passes a float as a tensor."""
    argument = node.meta.get("grapharg")
    return isinstance(node.meta.get("example_value"), SYMBOLS) or getattr(
        argument, "pass_arg_as_tensor", False
    )


def _may_stay(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    if any(map(_has_symbols, iter_tensors(value))):
        return False
    read = [source.meta.get("example_value") for source in node.all_input_nodes]
    if node.op == "output":
        return not any(isinstance(each, torch.SymFloat) for each in read)
    if node.op == "placeholder":
        return True
    if not isinstance(value, SYMBOLS):
        alone = not any(isinstance(each, torch.Tensor) for each in read)  # a tensor of it, to be returned
        return not any(
            isinstance(each, torch.SymInt) or (alone and isinstance(each, SYMBOLS)) for each in read
        )
    if isinstance(value, torch.SymFloat):
        return _is_item(node) or (node.target in EXACT and all(map(_is_item, node.all_input_nodes)))
    return all(isinstance(each, torch.SymInt) for each in read)


def _is_item(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "item"


def _has_symbols(tensor: torch.Tensor) -> bool:
    return any(isinstance(number, torch.SymInt) for number in (*tensor.shape, *tensor.stride()))
