"""A gradient that leaves a graph as the terms of a sum, which autograd then adds up itself.

Let autograd add up what a graph gives for one input as several gradients (see `capture.sums`).

The input passes through a fan on its way into the graph: a node of autograd with as many edges to what made
the input as its gradient has terms.

Autocast as eager PyTorch runs it: a weight is cast once, its gradients are summed before they are cast.

While torch traces, autocast does not remember its casts, so that a weight that is used several times is
cast as often, and its gradients are summed in the weight's own precision.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx


def terms(*gradients: torch.Tensor) -> torch.Tensor:
    """An op of backward graphs: one tensor that carries all `gradients` to where they are added up."""
    carrier: Any = gradients[0].detach()
    carrier.lowtide_terms = gradients
    return carrier  # type: ignore[no-any-return]


def taken_apart(carrier: Any) -> tuple[torch.Tensor, ...]:
    """The gradients that `terms` was given, or the one that no such op has seen. Only once: autograd would
    copy what is known elsewhere."""
    gradients: tuple[torch.Tensor, ...] | None = getattr(carrier, "lowtide_terms", None)
    if gradients is None:
        return (carrier,)
    del carrier.lowtide_terms
    return gradients


class _GradientTerms(torch.autograd.Function):
    """Gives an input on as it is."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, *_same: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return value

    @staticmethod
    def backward(ctx: Any, carrier: Any) -> Any:
        gradients = () if carrier is None else taken_apart(carrier)
        del carrier
        return (*gradients, *[None] * (len(ctx.needs_input_grad) - len(gradients)))


def with_gradient_terms(function: Callable[..., Any], fans: Mapping[int, int]) -> Callable[..., Any]:
    """`function`, a compiled graph, called with some inputs behind fans; each with its number of terms."""

    def call(*args: Any) -> Any:
        values = list(args)
        for place, number in fans.items():
            values[place] = _GradientTerms.apply(*[args[place]] * number)  # type: ignore[no-untyped-call]
        del args
        return function(*values)

    return call


aten = torch.ops.aten

BY_HAND = {"to", "bfloat16", "half", "type", "type_as", "to_copy"}
"""What a user calls to cast a tensor; such casts are never remembered."""


def cast_weights_once(graph: fx.Graph, weights: Collection[fx.Node]) -> None:
    """Let autocast's casts of each of the inputs `weights` of a joint graph be one; preserves all else."""
    for weight in weights:
        for casts in _by_type(weight):
            numbers = {cast.meta.get("seq_nr") for cast in casts}
            for cast in casts[1:]:
                cast.replace_all_uses_with(casts[0])
                graph.erase_node(cast)
            for result in graph.output_node().all_input_nodes:
                _sum_before_cast(graph, result, numbers)


def type_of_cast(weight: fx.Node, gradient: fx.Node) -> torch.dtype | None:
    """The type that autocast casts the input `weight` of a joint graph to, where its `gradient` is that of
    this one cast and of nothing else; None for all others."""
    for dtype, casts in _casts_by_type(weight).items():
        if _is_cast_back(gradient, {cast.meta.get("seq_nr") for cast in casts}):
            return dtype
    return None


def is_cast(value: fx.Node) -> bool:
    """Whether a value was in another type before."""
    return value.target is aten._to_copy.default


def is_sum_in_type_of_cast(gradient: fx.Node) -> bool:
    """Whether a gradient that is cast back is that of several uses of the cast."""
    source = gradient.args[0] if is_cast(gradient) else None
    return isinstance(source, fx.Node) and _is_sum(source)


def _by_type(weight: fx.Node) -> list[list[fx.Node]]:
    """The casts of a weight that autocast made, where there are several to one type."""
    return [casts for casts in _casts_by_type(weight).values() if len(casts) > 1]


def _casts_by_type(weight: fx.Node) -> dict[torch.dtype, list[fx.Node]]:
    """The casts of a weight that autocast made."""
    found: dict[torch.dtype, list[fx.Node]] = {}
    for user in weight.users:
        if user.target is aten._to_copy.default and set(user.kwargs) == {"dtype"} and not _is_by_hand(user):
            dtype = user.kwargs["dtype"]
            assert isinstance(dtype, torch.dtype)
            if dtype.itemsize < weight.meta["val"].dtype.itemsize:
                found.setdefault(dtype, []).append(user)
    return found


def _is_by_hand(cast: fx.Node) -> bool:
    stack = cast.meta.get("source_fn_stack") or [("", "")]
    target = stack[-1][1]
    return (target if isinstance(target, str) else getattr(target, "__name__", "")) in BY_HAND


def _sum_before_cast(graph: fx.Graph, result: fx.Node, numbers: Collection[int | None]) -> None:
    """Where `result` is a sum of gradients, add up those that were cast from autocast's type before casting.

    torch adds them as they arrive; the cast one arrives with the last of them.
    """
    sums, addends = _sums(result), _addends(result)
    cast = [addend for addend in addends if _is_cast_back(addend, numbers)]
    if len(cast) < 2:
        return
    lower: fx.Node | None = None
    total: fx.Node | None = None
    for position, addend in enumerate(addends):
        with graph.inserting_before(sums[max(0, position - 1)]):
            new = addend
            if addend in cast:
                source = addend.args[0]
                assert isinstance(source, fx.Node)
                lower = source if lower is None else _added(graph, lower, source, like=source)
                if addend is not cast[-1]:
                    continue
                new = _cast_like(graph, lower, addend)
            total = new if total is None else _added(graph, total, new, like=result)
    assert total is not None
    result.replace_all_uses_with(total)
    for node in (*reversed(sums), *cast):
        if not node.users:
            graph.erase_node(node)


def _cast_like(graph: fx.Graph, value: fx.Node, cast: fx.Node) -> fx.Node:
    made = graph.call_function(aten._to_copy.default, (value,), cast.kwargs)
    made.meta = dict(cast.meta)
    return made


def _added(graph: fx.Graph, one: fx.Node, other: fx.Node, *, like: fx.Node) -> fx.Node:
    sum_of = graph.call_function(aten.add.Tensor, (one, other))
    sum_of.meta = {**like.meta, "is_gradient_acc": True}
    sum_of.meta["val"] = aten.add.Tensor(one.meta["val"], other.meta["val"])
    return sum_of


def _sums(result: fx.Node) -> list[fx.Node]:
    """The additions that make a gradient of several, in the order that torch runs them."""
    if not _is_sum(result):
        return []
    first = result.args[0]
    assert isinstance(first, fx.Node)
    return [*_sums(first), result]


def _addends(result: fx.Node) -> list[fx.Node]:
    """What a gradient is the sum of, in the order that torch adds it up; itself where it is no sum."""
    if not _is_sum(result):
        return [result]
    first, second = result.args
    assert isinstance(first, fx.Node) and isinstance(second, fx.Node)
    return [*_addends(first), second]


def _is_sum(node: fx.Node) -> bool:
    return node.target is aten.add.Tensor and bool(node.meta.get("is_gradient_acc"))


def _is_cast_back(node: fx.Node, numbers: Collection[int | None]) -> bool:
    return (
        node.target is aten._to_copy.default
        and bool(node.meta.get("autograd_backward"))
        and node.meta.get("seq_nr") in numbers
    )
