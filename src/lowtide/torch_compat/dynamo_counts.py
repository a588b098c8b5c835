"""Counts of indices under Dynamo: `bincount` has a known shape where the range of its input is known.

    chosen = scores.topk(2).indices                    below the number of experts, 8 columns of `scores`
    torch.bincount(chosen.flatten(), minlength=8)      8 counts, whatever the values are

torch ends a graph at `bincount`, since one large value makes the result longer. Here the range of the input
follows from the ops that made it: places in a dimension of a known size (`topk`, `sort`, `argmax`), then
moved, copied or chosen, but not changed. Where no value can reach `minlength`, the graph adds ones at the
values instead. Whole numbers add up exactly in any order.

Shortcoming: arithmetic on indices (`chosen // 2`), a mask among the chosen, and values of an earlier graph
have no known range.
"""

import contextlib
import operator
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from lowtide.torch_compat.dynamo_values import node_name, writes_to

BINCOUNT = "bincount"
ARGUMENTS = ("weights", "minlength")
"""Of `bincount`, after its input."""

# fmt: off
DIMENSION_AT = {
    "argmax": 1, "argmin": 1, "argsort": 1, "kthvalue": 2, "max": 1, "median": 1, "min": 1, "mode": 1,
    "multinomial": None, "nanmedian": 1, "sort": 1, "topk": 2,
}
"""Ops that give places in a dimension of their input, and the position of that dimension's argument."""
OF_ALL = {"argmax", "argmin"}
"""Ops that give a place among all elements where no dimension is given."""
PAIRS = {"kthvalue", "max", "median", "min", "mode", "nanmedian", "sort", "topk"}
"""Ops that give values and places."""
SAME_VALUES = {
    "clone", "contiguous", "detach", "expand", "expand_as", "flatten", "flip", "gather", "getitem",
    "index_select", "int", "long", "movedim", "permute", "ravel", "repeat", "repeat_interleave",
    "reshape", "roll", "select", "squeeze", "t", "take_along_dim", "to", "transpose", "type", "unflatten",
    "unsqueeze", "view", "view_as",
}
"""Ops whose results have no other values than their first input has."""
# fmt: on


@contextlib.contextmanager
def counts_in_range() -> Iterator[None]:
    """While torch traces, keep `bincount` in the graph where its result has `minlength` counts."""
    handlers: dict[Any, Callable[..., Any]] = TorchInGraphFunctionVariable._get_handlers()
    with (
        unittest.mock.patch.dict(handlers, {torch.bincount: _function(handlers.get(torch.bincount))}),
        unittest.mock.patch.object(TensorVariable, "call_method", _method(TensorVariable.call_method)),
    ):
        yield


def _function(torchs: Callable[..., Any] | None) -> Callable[..., Any]:
    def call(called: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = (*args, *([kwargs["input"]] if "input" in kwargs else ()))
        rest = {name: value for name, value in kwargs.items() if name != "input"}
        found = _counted(tx, inputs, rest)
        if found is None and torchs is not None:
            return torchs(called, tx, *args, **kwargs)
        return found  # None: Dynamo goes on as without a handler

    return call


def _method(torchs: Callable[..., Any]) -> Callable[..., Any]:
    def call_method(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        found = _counted(tx, (variable, *args), kwargs) if name == BINCOUNT else None
        return torchs(variable, tx, name, args, kwargs) if found is None else found

    return call_method


def _counted(tx: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The variable of the counts; None where their number is not known."""
    given = {**dict(zip(ARGUMENTS, args[1:], strict=False)), **kwargs}
    if not args or not isinstance(args[0], TensorVariable) or not set(given) <= set(ARGUMENTS):
        return None
    weights, minlength = given.get("weights"), given.get("minlength")
    if weights is not None and not (weights.is_python_constant() and weights.as_python_constant() is None):
        return None
    if minlength is None or not minlength.is_python_constant():
        return None
    node, length = args[0].proxy.node, minlength.as_python_constant()
    example = node.meta.get("example_value")
    if not isinstance(length, int) or not isinstance(example, torch.Tensor) or example.dim() != 1:
        return None
    limit = _limit(node) if node.graph is tx.output.graph else None
    if limit is None or limit > length:
        return None
    proxy = tx.output.create_proxy("call_function", counts, (args[0].as_proxy(), length), {})
    return wrap_fx_proxy(tx, proxy)


def counts(values: torch.Tensor, length: int) -> torch.Tensor:
    """`torch.bincount(values, minlength=length)` where all values are below `length`."""
    places = values.long()
    one = torch.ones((), dtype=torch.int64, device=values.device)
    return one.new_zeros(length).index_add_(0, places, one.expand_as(places))


def _limit(node: fx.Node) -> int | None:
    """A number that all values of a tensor of indices are below, from 0 on; None where it is unknown."""
    chain = []
    while (source := _same_values(node)) is not None:
        chain.append(node)
        node = source
    limit = _size_of_dimension(node)
    chain.append(node)
    fits = limit is not None and all(_holds(each, limit) for each in chain)
    return limit if fits and not writes_to(chain) else None


def _holds(node: fx.Node, limit: int) -> bool:
    """Whether the result's type has all numbers below `limit`."""
    example = node.meta.get("example_value")
    if not isinstance(example, torch.Tensor) or example.dtype.is_floating_point or example.dtype.is_complex:
        return False
    return example.dtype is not torch.bool and limit - 1 <= torch.iinfo(example.dtype).max


def _same_values(node: fx.Node) -> fx.Node | None:
    """The tensor that has all values of a node's result."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or node_name(node) not in SAME_VALUES:
        return None
    example = source.meta.get("example_value")
    if isinstance(example, torch.Tensor):
        is_reinterpreted = node_name(node) == "view" and node.meta["example_value"].dtype != example.dtype
        return None if is_reinterpreted else source
    # of (values, places): the values are the input's
    is_values = node.target is operator.getitem and node.args[1] == 0 and node_name(source) in PAIRS
    values = source.args[0] if is_values and source.args else None
    return values if isinstance(values, fx.Node) else None


def _size_of_dimension(node: fx.Node) -> int | None:
    """The size of the dimension that a node's result has places in."""
    if node.target is operator.getitem:
        pair, place = node.args
        if not isinstance(pair, fx.Node) or place != 1 or node_name(pair) not in PAIRS:
            return None
        node = pair
    elif node_name(node) in PAIRS:
        return None
    name = node_name(node)
    source = node.args[0] if node.args else None
    example = source.meta.get("example_value") if isinstance(source, fx.Node) else None
    if name not in DIMENSION_AT or not isinstance(example, torch.Tensor) or not example.dim():
        return None
    position = DIMENSION_AT[name]
    given = node.args[position] if position is not None and len(node.args) > position else None
    dimension = node.kwargs.get("dim", given)
    if dimension is None and name in OF_ALL:
        return int(example.numel())
    dimension = -1 if dimension is None else dimension
    return int(example.shape[dimension]) if type(dimension) is int else None
