"""Calls of a graph that a compiler must leave as they are, behind one op.

Inductor refuses what is no op of torch, draws random numbers in an order of its own, and adds numbers up in
an order that depends on what else it does in the same loop. `lowtide::opaque` is an op that it knows nothing
of: it makes a call by its number, and reads a token of the call before, so that they stay in their order.
"""

import itertools
import operator
import weakref
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.torchside.calls import iter_tensors, map_leaves
from lowtide.torchside.hooks import OpOverload, graph_module

_LIBRARY: Any = torch.library.Library("lowtide", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("opaque(Tensor[] inputs, Tensor? before, int number) -> Tensor[]")

aten = torch.ops.aten

MOVES = frozenset(
    {
        *(aten.arange, aten.full, aten.full_like, aten.ones, aten.ones_like, aten.zeros, aten.zeros_like),
        *(aten._to_copy, aten.cat, aten.clone, aten.constant_pad_nd, aten.reshape, aten.scalar_tensor),
        *(aten._unsafe_view, aten.lift_fresh_copy, aten.select_backward, aten.slice_backward),
    }
)
"""Ops that compute nothing."""

_numbers = itertools.count(1)
_calls: dict[int, fx.Node] = {}


class OpaqueGraph:
    """A graph with the op in place of whatever is no op of torch, or random.

    The calls can be made as long as this object lives.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._numbers: list[int] = []
        self._before: fx.Node | None = None
        self._new: dict[fx.Node, Any] = {}
        graph = fx.Graph()
        for node in module.graph.nodes:
            self._new[node] = self._opaque(graph, node) if _is_opaque(node) else self._copied(graph, node)
        self._new.clear()
        self.module = graph_module(module, graph)
        weakref.finalize(self, _forget, self._numbers)

    def calls_of(self, module: fx.GraphModule) -> dict[int, fx.Node]:
        """The nodes of an equal graph that stand where this one has the op, by their numbers."""
        return dict(zip(self._numbers, filter(_is_opaque, module.graph.nodes), strict=True))

    def _opaque(self, graph: fx.Graph, node: fx.Node) -> Any:
        """Whatever the call returns, its tensors as parts of what the op returns."""
        number = next(_numbers)
        self._numbers.append(number)
        _calls[number] = node
        inputs = [self._new[source] for source in node.all_input_nodes]
        made = graph.call_function(torch.ops.lowtide.opaque.default, (inputs, self._before, number))
        self._before = graph.call_function(operator.getitem, (made, 0))
        places = itertools.count(1)

        def part(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return graph.call_function(operator.getitem, (made, next(places)))

        return map_leaves(part, node.meta["val"])

    def _copied(self, graph: fx.Graph, node: fx.Node) -> Any:
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and not isinstance(self._new[source], fx.Node):
            return self._new[source][node.args[1]]  # a part of what an opaque call returned
        return graph.node_copy(node, lambda read: self._new[read])


def _is_opaque(node: fx.Node) -> bool:
    op = node.target
    if node.op != "call_function" or op is operator.getitem:
        return False
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded in op.tags:
        return True
    return not (torch.Tag.pointwise in op.tags or op.is_view or op.overloadpacket in MOVES)


def _forget(numbers: list[int]) -> None:
    for number in numbers:
        del _calls[number]


def _run(inputs: list[Tensor], before: Tensor | None, number: int) -> list[Tensor]:
    node = _calls[number]
    values = dict(zip(node.all_input_nodes, inputs, strict=True))
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    assert callable(node.target)
    # brought back, an op may return less: batch norm without its statistics
    pairs = itertools.zip_longest(_leaves(node.meta["val"]), _leaves(node.target(*args, **kwargs)))
    return [torch.empty(0), *(_like(fake, value) for fake, value in pairs if isinstance(fake, Tensor))]


def _fake(inputs: list[Tensor], before: Tensor | None, number: int) -> list[Tensor]:
    return [torch.empty(0), *(_empty(value) for value in iter_tensors(_calls[number].meta["val"]))]


def _leaves(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, (list, tuple)) else [value]


def _like(fake: Tensor, value: Any) -> Tensor:
    """A value in the layout that the compiled code counts on: real ones differ from fake ones at times, and
    are missing where nobody reads them."""
    if not isinstance(value, Tensor):
        return _empty(fake)
    if value.dtype == fake.dtype and value.stride() == fake.stride():
        return value
    return _empty(fake).copy_(value)


def _empty(like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


_LIBRARY.impl("opaque", _run, "CompositeExplicitAutograd")
torch.library.register_fake("lowtide::opaque", _fake, lib=_LIBRARY)
