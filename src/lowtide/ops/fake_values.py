"""Fake values of a graph's nodes, renewed where an edit gives ops other inputs.

    sum [2, 1] ── neg [2, 1] ── t [1, 2]        ==>        term [1, 2] ── neg [1, 2] ── t [2, 1]

A graph decides by its fake values which storages values share, and which op may write over which input. An
edit that replaces a value by another one of the same size, but with other strides or on another storage, has
to renew the values of its readers, of theirs, and so on, as far as anything changes.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.ops.calls import Call, call_of
from lowtide.ops.gradient_terms import terms
from lowtide.ops.in_place import is_overwriting, plain_call
from lowtide.ops.schema import is_view
from lowtide.torch_compat.dispatch import FakeTensor, iter_tensors

aten = torch.ops.aten


def renew_values(graph: fx.Graph, readers: Collection[fx.Node]) -> None:
    """Renew the fake values of `readers`, whose inputs have changed, and of all that depends on them.

    An op that would write its result over an input with other strides than the result's makes a result of its
    own instead, as eager does. Preserves all else.
    """
    stale = set(readers)
    for node in graph.nodes:
        if node not in stale or node.op == "output":
            continue
        if is_overwriting(node):
            _make_own_result(node)
        call = call_of(node)
        value = _result(call)
        if is_view(call) or node.target is terms or not _same_layout(value, node.meta.get("val")):
            node.meta["val"] = value
            stale.update(node.users)


def _result(call: Call) -> Any:
    if call.target is terms:
        return list(call.args)
    target = aten.reshape.default if call.target is aten.view.default else call.target
    mode = next(value.fake_mode for value in call.tensors if isinstance(value, FakeTensor))
    with torch.no_grad(), mode:
        return target(*call.args, **call.kwargs)


def _make_own_result(node: fx.Node) -> None:
    """Let a node that writes over an input make a new result where that has other strides."""
    over, plain = call_of(node), plain_call(call_of(node))
    if not _same_layout(_result(over), _result(plain)):
        assert callable(node.target)
        own = plain_call(Call(node.target, node.args, dict(node.kwargs)))
        node.target, node.args, node.kwargs = own.target, own.args, own.kwargs


def _same_layout(one: Any, other: Any) -> bool:
    return _layouts(one) == _layouts(other)


def _layouts(value: Any) -> list[Any]:
    return [(tensor.dtype, tensor.shape, _strides(tensor)) for tensor in iter_tensors(value)]


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides that matter: those of dimensions of one element do not."""
    if tensor.layout is not torch.strided:
        return ()
    return tuple(step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)
