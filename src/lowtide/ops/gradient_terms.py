"""Sums of gradients in eager's order: gradients that leave a graph as terms, and autocast's casts of weights.

Autograd adds the gradients of a tensor one by one, from its last use to its first. Two kinds of graphs would
add in another order:

- a graph whose input another graph uses, too. The graph returns the `terms` of the input's gradient, and
  autograd adds them up: `_GradientTerms` has one edge for each term.
- a graph under autocast. Eager casts a weight once, adds the gradients of the cast, and casts the sum back.
  While torch traces, autocast casts a weight at each use.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx

from lowtide.torch_compat.aot_autograd import OWN_SUM
from lowtide.torch_compat.dtensor import IS_PART, edges_to

aten = torch.ops.aten

CAST_BY_USER = {"to", "bfloat16", "half", "type", "type_as", "to_copy"}
"""Functions by which a user casts a tensor; autocast caches no such cast."""

CAST_ONCE = "lowtide_cast_once"
"""In the metadata of a weight that autocast casts once for the whole graph."""


def terms(*gradients: torch.Tensor) -> torch.Tensor:
    """An op of backward graphs: one tensor that carries all `gradients` to autograd's sum."""
    carrier: Any = gradients[0].detach()
    carrier.lowtide_terms = gradients
    return carrier  # type: ignore[no-any-return]


class _GradientTerms(torch.autograd.Function):
    """The identity of an input, with an edge of autograd for each term of the input's gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, *_same: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return value

    @staticmethod
    def backward(ctx: Any, carrier: Any) -> Any:
        gradients: tuple[torch.Tensor, ...] = () if carrier is None else (carrier,)
        if hasattr(carrier, "lowtide_terms"):
            gradients = carrier.lowtide_terms
            del carrier.lowtide_terms  # autograd would copy a gradient that has another reference
        del carrier
        return (*gradients, *[None] * (len(ctx.needs_input_grad) - len(gradients)))


def with_gradient_terms(function: Callable[..., Any], num_terms: Mapping[int, int]) -> Callable[..., Any]:
    """The compiled graph `function`, whose input `i` gets a gradient of `num_terms[i]` terms."""

    def call(*args: Any) -> Any:
        values = list(args)
        for place, number in num_terms.items():
            values[place] = _GradientTerms.apply(*edges_to(args[place], number))  # type: ignore[no-untyped-call]
        del args
        return function(*values)

    return call


def return_terms(module: fx.GraphModule, places: Collection[int]) -> None:
    """A pass: return the gradients at these positions among a graph's results as terms, in place.

        a -+                            a -+
           add -+                       b -+- terms -> output
        b -+    add -> output    ==>    c -+
        c ------+

    Preserves all other results.
    """
    graph, output = module.graph, module.graph.output_node()
    results = output.args[0]
    assert isinstance(results, (list, tuple))
    returned: list[Any] = list(results)
    for place in sorted(places):
        grad = returned[place]
        if not isinstance(grad, fx.Node):
            continue
        parts = terms_of(grad)
        last_input = graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_after(last_input if grad.op == "placeholder" else grad):
            node = graph.call_function(terms, tuple(parts))
        node.meta = {**grad.meta, "val": [part.meta["val"] for part in parts]}
        for mark in ("is_gradient_acc", OWN_SUM):
            node.meta.pop(mark, None)
        returned[place] = node
    output.args = (returned,)
    for node in reversed(list(graph.nodes)):
        if adds_gradients(node) and not node.users:
            graph.erase_node(node)
    module.recompile()


def is_part(value: fx.Node) -> bool:
    """Whether an input of a graph is this process's part of a DTensor. Other uses of the DTensor are out of
    sight, so that the terms of its gradient always leave the graph one by one."""
    return bool(value.meta.get(IS_PART))


def adds_gradients(node: fx.Node) -> bool:
    """Whether a node is autograd's sum of two gradients of one tensor."""
    return bool(node.meta.get("is_gradient_acc"))


def is_own_sum(node: fx.Node) -> bool:
    """Whether a node is autograd's sum of two gradients of an input of the graph."""
    return bool(node.meta.get(OWN_SUM))


def terms_of(grad: fx.Node) -> list[fx.Node]:
    """The gradients that autograd adds up to `grad`, in its order; `grad` alone if it is no sum."""
    return _sum_of(grad)[1]


def _sum_of(grad: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The additions that lead to a gradient, and their terms, both in autograd's order."""
    sums: list[fx.Node] = []
    found: list[fx.Node] = []
    node = grad
    while is_own_sum(node):
        earlier, last = node.args[-2:]  # `write_over` has further arguments before these
        assert isinstance(earlier, fx.Node) and isinstance(last, fx.Node)
        sums.append(node)
        found.append(last)
        node = earlier
    return sums[::-1], [node, *reversed(found)]


def cast_weights_once(graph: fx.Graph) -> None:
    """A pass: let autocast cast each weight that is marked `CAST_ONCE` once for each dtype, in place.

        weight -+- cast -- mm                weight -- cast -+- mm
                +- cast -- mm         ==>                    +- mm
        cast(g1) + cast(g2) -> output        cast(g1 + g2) -> output

    Preserves all else.
    """
    for weight in graph.find_nodes(op="placeholder"):
        for casts in _casts_by_dtype(weight).values() if CAST_ONCE in weight.meta else ():
            if len(casts) < 2:
                continue
            numbers = {cast.meta.get("seq_nr") for cast in casts}
            for cast in casts[1:]:
                cast.replace_all_uses_with(casts[0])
                graph.erase_node(cast)
            for result in graph.output_node().all_input_nodes:
                _sum_before_cast(graph, result, numbers)


def dtype_of_cast(weight: fx.Node, gradient: fx.Node) -> torch.dtype | None:
    """The dtype that autocast casts a weight to, if the weight's `gradient` comes from this cast alone."""
    for dtype, casts in _casts_by_dtype(weight).items():
        if _is_cast_back(gradient, {cast.meta.get("seq_nr") for cast in casts}):
            return dtype
    return None


def is_cast(value: fx.Node) -> bool:
    """Whether an op casts to another dtype."""
    return value.target is aten._to_copy.default


def is_cast_of_sum(gradient: fx.Node) -> bool:
    """Whether a gradient is a sum over several uses of a cast weight, cast back after the sum."""
    source = gradient.args[0] if is_cast(gradient) else None
    return isinstance(source, fx.Node) and adds_gradients(source)


def _casts_by_dtype(weight: fx.Node) -> dict[torch.dtype, list[fx.Node]]:
    """The casts of a weight that autocast made."""
    found: dict[torch.dtype, list[fx.Node]] = {}
    for user in weight.users:
        if is_cast(user) and set(user.kwargs) == {"dtype"} and not _is_by_user(user):
            dtype = user.kwargs["dtype"]
            assert isinstance(dtype, torch.dtype)
            if dtype.itemsize < weight.meta["val"].dtype.itemsize:
                found.setdefault(dtype, []).append(user)
    return found


def _is_by_user(cast: fx.Node) -> bool:
    stack = cast.meta.get("source_fn_stack") or [("", "")]
    target = stack[-1][1]
    return (target if isinstance(target, str) else getattr(target, "__name__", "")) in CAST_BY_USER


def _is_cast_back(node: fx.Node, numbers: Collection[int | None]) -> bool:
    """Whether a node is the gradient of a cast by autocast; `numbers` are the casts' sequence numbers."""
    return is_cast(node) and bool(node.meta.get("autograd_backward")) and node.meta.get("seq_nr") in numbers


def _sum_before_cast(graph: fx.Graph, result: fx.Node, numbers: Collection[int | None]) -> None:
    """In a sum of gradients, add the terms in autocast's dtype first, then cast their sum back.

    Autograd adds gradients as they arrive. The gradient of the cast arrives with its last term.
    """
    sums, addends = _sum_of(result)
    cast = [addend for addend in addends if _is_cast_back(addend, numbers)]
    if len(cast) < 2:
        return
    lower: fx.Node | None = None
    total: fx.Node | None = None
    for position, addend in enumerate(addends):
        with graph.inserting_before(sums[max(0, position - 1)]):
            new = addend
            if addend in cast:
                (source,) = addend.args
                assert isinstance(source, fx.Node)
                lower = source if lower is None else _added(graph, lower, source, like=source)
                if addend is not cast[-1]:
                    continue
                new = graph.call_function(aten._to_copy.default, (lower,), addend.kwargs)
                new.meta = dict(addend.meta)
            total = new if total is None else _added(graph, total, new, like=result)
    assert total is not None
    result.replace_all_uses_with(total)
    for node in (*reversed(sums), *cast):
        if not node.users:
            graph.erase_node(node)


def _added(graph: fx.Graph, one: fx.Node, other: fx.Node, *, like: fx.Node) -> fx.Node:
    sum_of = graph.call_function(aten.add.Tensor, (one, other))
    sum_of.meta = {**like.meta, "is_gradient_acc": True}
    sum_of.meta["val"] = aten.add.Tensor(one.meta["val"], other.meta["val"])
    return sum_of
