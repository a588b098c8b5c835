"""Find heads with their loss in a joint graph, and run them in chunks of rows (`head_chunks`). This rounds.

    product -> views, slices, casts -> log-softmax -> nll_loss | gather      ==>  head_values -> picked_loss
    loss's gradient -> casts, views -> product (input), product (weight), sum (bias)   ==>  head_gradients

A head is left as it is where anything else reads its logits or its log-probabilities; `Refusal` says what.
"""

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lowtide.ops.calls import call_of
from lowtide.ops.head_chunks import (
    Steps,
    head_values,
    loss_head_gradients,
    picked_head_gradients,
    picked_loss,
    unread_logits,
)
from lowtide.ops.loss_chunks import PRODUCTS, log_probabilities, loss_gradient
from lowtide.ops.schema import bound_arguments, is_backward, is_view_op
from lowtide.torch_compat.dispatch import FakeTensor

aten = torch.ops.aten

SAME_VALUES = (aten.clone.default, aten.alias.default, aten.detach.default, aten._to_copy.default)
SHAPED = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
PRODUCTS_BACK = (*SHAPED, *SAME_VALUES, aten.slice_backward.default)

NO_HEAD = "no linear layer is followed by a cross entropy, or by a log-softmax and a gather, in one graph"
READ_BY_LOOP = (
    "the logits are an output of the model, which the loop may read: say holds_outputs=False where it reads "
    "only the loss, and they are not made"
)
READ_BY_LOSS = "the logits leave the model for a loss outside: compute the loss in forward"


class Refusal(Exception):
    """Why a head is left as it is."""


@dataclass(eq=False)
class _Match:
    """A head with its loss: the nodes that are replaced, and what replaces them."""

    scores: fx.Node
    arguments: list[Any]
    steps: Steps
    outputs: list[fx.Node]
    pick: fx.Node
    gradient: fx.Node
    sums: list[fx.Node] = field(default_factory=list)
    of_hidden: fx.Node | None = None
    of_weight: fx.Node | None = None
    of_bias: fx.Node | None = None

    @property
    def wanted(self) -> tuple[bool, bool, bool]:
        return self.of_hidden is not None, self.of_weight is not None, self.of_bias is not None


def use_rounded_head(
    graph: fx.Graph, *, num_outputs: int, returned: Collection[int]
) -> tuple[bool, list[str]]:
    """Run every head of a joint graph in chunks that can. Returns whether one did, and why others cannot.

    The graph has `num_outputs` results of the forward pass, of which the loop may read those `returned`.
    """
    refused, used = [], False
    for scores in [
        node for node in graph.nodes if node.target in (log_probabilities, aten._log_softmax.default)
    ]:
        if is_backward(scores):
            continue
        try:
            match = _matched(scores, num_outputs=num_outputs, returned=returned)
        except Refusal as why:
            refused.append(str(why))
            continue
        if match is not None:
            _replace(graph, match)
            used = True
    if used:
        graph.lint()
    return used, refused


def _matched(scores: fx.Node, *, num_outputs: int, returned: Collection[int]) -> _Match | None:
    """None where the log-softmax is not that of a product, or nothing differentiates it."""
    found = _source(scores)
    if found is None:
        return None
    arguments, chain = found
    value = scores.meta["val"]
    outputs = _unread_outputs(chain, scores, num_outputs=num_outputs, returned=returned)
    steps = _steps(chain)
    if scores.target is not log_probabilities and scores.args[1] not in (-1, value.dim() - 1):
        raise Refusal("the classes are not the last dimension of the logits")
    readers = list(_readers(scores))
    picks = [n for n in readers if n.target in (aten.nll_loss_forward.default, aten.gather.default)]
    sums = [n for n in readers if _is_row_sum(n)]
    backs = [n for n in readers if n.target in (loss_gradient, aten._log_softmax_backward_data.default)]
    other = next((n for n in readers if n not in (*picks, *sums, *backs)), None)
    if not backs:
        return None
    if other is not None or len(picks) != 1 or len(backs) != 1:
        raise Refusal(f"'{(other or readers[-1]).name}' reads all log-probabilities as well")
    match = _Match(scores, arguments, steps, outputs, picks[0], backs[0], sums)
    _check_pick(match)
    _find_products(match, arguments)
    return match


def _source(scores: fx.Node) -> tuple[list[Any], list[fx.Node]] | None:
    """The arguments of the product that a log-softmax reads, and the nodes from the product on, in order."""
    if scores.target is log_probabilities:
        return list(scores.args[1]), []  # type: ignore[arg-type]
    chain: list[fx.Node] = []
    node: Any = scores.args[0]
    while isinstance(node, fx.Node) and node.target not in PRODUCTS:
        if node.target not in (*SAME_VALUES, *SHAPED, aten.slice.Tensor):
            return None
        chain.insert(0, node)
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.kwargs:
        return None
    return list(node.args), [node, *chain]


def _unread_outputs(
    chain: list[fx.Node], scores: fx.Node, *, num_outputs: int, returned: Collection[int]
) -> list[fx.Node]:
    """The nodes of the chain that the graph returns and nobody reads; Refusal where anybody reads one."""
    found = []
    for node, following in zip(chain, [*chain[1:], scores], strict=False):
        for user in node.users:
            if user is following:
                continue
            if user.op != "output":
                raise Refusal(f"'{user.name}' reads all logits as well")
            results: Any = user.args[0]
            places = [place for place, result in enumerate(results) if result is node]
            if any(place in returned for place in places):
                raise Refusal(READ_BY_LOOP)
            if any(place >= num_outputs for place in places):
                raise Refusal(READ_BY_LOSS)
            found.append(node)
    return found


def _steps(chain: list[fx.Node]) -> Steps:
    """Which rows of the product the end of the chain has, as shapes and slices without the classes."""
    steps: list[tuple[str, tuple[int, ...]]] = []
    for node in chain[1:]:
        shape = tuple(int(size) for size in node.meta["val"].shape)
        if node.target in SHAPED:
            if shape[-1] != chain[0].meta["val"].shape[-1]:
                raise Refusal(f"'{node.name}' gives the logits another shape than rows of classes")
            steps.append(("shape", shape[:-1]))
        elif node.target is aten.slice.Tensor:
            bound = bound_arguments(call_of(node))[1]
            dim = int(bound["dim"]) % len(shape)
            if dim == len(shape) - 1:
                raise Refusal(f"'{node.name}' leaves classes out")
            wanted = slice(bound["start"], bound["end"], bound["step"])
            low, high, by = wanted.indices(int(bound["self"].shape[dim]))
            steps.append(("slice", (dim, low, high, by)))
    return tuple(steps)


def _readers(value: fx.Node) -> Iterator[fx.Node]:
    """What reads a value, directly or detached."""
    for user in value.users:
        if user.target in (aten.detach.default, aten.alias.default):
            yield from _readers(user)
        else:
            yield user


def _is_row_sum(node: fx.Node) -> bool:
    if node.target is not aten.sum.dim_IntList or is_backward(node) or node.kwargs:
        return False
    source: Any = node.args[0]
    return len(node.args) == 2 and list(node.args[1]) in ([-1], [source.meta["val"].dim() - 1])  # type: ignore[arg-type]


def _check_pick(match: _Match) -> None:
    """Refusal where forward and backward do not belong to one loss."""
    pick, back = match.pick, match.gradient
    if pick.target is aten.nll_loss_forward.default:
        if back.target is not loss_gradient or back.args[2] is not pick.args[1]:
            raise Refusal(f"'{back.name}' is not the gradient of a loss of classes alone")
        return
    scatter: Any = back.args[0]
    value, index = match.scores.meta["val"], pick.args[2]
    fits = (
        back.target is aten._log_softmax_backward_data.default
        and not match.sums
        and isinstance(scatter, fx.Node)
        and scatter.target is aten.scatter_add.default
        and len(scatter.users) == 1
        and scatter.args[2] is index
        and _is_zero(scatter.args[0])
        and isinstance(index, fx.Node)
        and tuple(index.meta["val"].shape) == (*value.shape[:-1], 1)
        and pick.args[1] in (-1, value.dim() - 1)
    )
    if not fits:
        raise Refusal(f"'{pick.name}' reads more than one log-probability of a row")


def _is_zero(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.new_zeros.default and len(node.users) == 1


def _find_products(match: _Match, arguments: list[Any]) -> None:
    """Find the gradients of the head's input, weight and bias, which all read the logits' gradient."""
    *_, hidden, weight = arguments
    size = (int(hidden.meta["val"].shape[0]), int(weight.meta["val"].shape[1]))
    node = match.gradient
    while not (users := list(node.users)) or not _are_products(users, node, size):
        if len(users) != 1 or users[0].target not in PRODUCTS_BACK:
            raise Refusal(f"the gradient of the logits has other readers than the head, as '{node.name}'")
        node = users[0]
    for user in users:
        if user.target is aten.sum.dim_IntList:
            match.of_bias = user
        elif user.target is aten.mm.default:
            match.of_hidden = user
        else:
            (match.of_weight,) = user.users
    pairs = ((match.of_hidden, hidden, False), (match.of_weight, weight, True))
    for made, like, turned in pairs:
        if made is None:
            continue
        shape = tuple(like.meta["val"].shape)
        if tuple(made.meta["val"].shape) != (shape[::-1] if turned else shape):
            raise Refusal(f"'{made.name}' is no gradient of the head")


def _are_products(users: list[fx.Node], value: fx.Node, size: tuple[int, int]) -> bool:
    """Whether these readers of the logits' gradient are the gradients of a linear layer."""
    if tuple(value.meta["val"].shape) != size:
        return False
    kinds = []
    for user in users:
        if user.target is aten.mm.default and user.args[0] is value:
            kinds.append("hidden")
        elif user.target is aten.t.default and [u.target for u in user.users] == [aten.mm.default]:
            kinds.append("weight" if next(iter(user.users)).args[0] is user else "")
        elif user.target is aten.sum.dim_IntList and list(user.args[1:]) == [[0], True]:
            kinds.append("bias")
        else:
            return False
    return "" not in kinds and len(set(kinds)) == len(kinds)


def _replace(graph: fx.Graph, match: _Match) -> None:
    dtype = match.scores.meta["val"].dtype
    first = (match.arguments, match.steps, dtype)
    pick, back = match.pick, match.gradient
    is_loss = pick.target is aten.nll_loss_forward.default
    target: Any = pick.args[1] if is_loss else pick.args[2]
    ignored = pick.args[4] if is_loss else None
    values = _add(graph, pick, head_values, (*first, target, ignored, bool(match.sums)))
    picked = _item(graph, pick, values, 0)
    for node in match.sums:
        node.replace_all_uses_with(_shaped_like(graph, pick, _item(graph, pick, values, 1), node))
    if is_loss:
        loss = _add(graph, pick, picked_loss, (picked, *pick.args[1:]))
        pick.replace_all_uses_with(loss)
        grad, _, *rest = back.args
        made: tuple[Any, tuple[Any, ...]] = (
            loss_head_gradients,
            (*first, match.wanted, grad, *rest[:5], rest[-1]),
        )
    else:
        pick.replace_all_uses_with(_shaped_like(graph, pick, picked, pick))
        scatter: Any = back.args[0]
        made = (picked_head_gradients, (*first, match.wanted, scatter.args[3], target))
    gradients = _add(graph, back, *made)
    results = [each for each in (match.of_hidden, match.of_weight, match.of_bias) if each is not None]
    for place, node in enumerate(results):
        node.replace_all_uses_with(_item(graph, back, gradients, place))
    for node in match.outputs:
        like = node.meta["val"]
        size = [int(each) for each in like.shape]
        empty = _add(graph, node, unread_logits, (size, like.dtype, like.device))
        graph.output_node().replace_input_with(node, empty)
    _erase(graph, [*results, *match.sums, pick, back, match.scores])


def _add(graph: fx.Graph, at: fx.Node, function: Any, args: tuple[Any, ...]) -> fx.Node:
    """A call in the place of a node, with its marks and a fake value of its own."""
    with graph.inserting_before(at):
        node = graph.call_function(function, args)
    node.meta = {key: value for key, value in at.meta.items() if key != "val"}
    node.meta["val"] = _value(at, function, args)
    return node


def _value(like: fx.Node, function: Any, args: tuple[Any, ...]) -> Any:
    fakes = [n.meta["val"] for n in like.graph.nodes if isinstance(n.meta.get("val"), FakeTensor)][:1]
    with fakes[0].fake_mode:
        return function(*fx.node.map_arg(args, lambda read: read.meta["val"]))


def _item(graph: fx.Graph, at: fx.Node, source: fx.Node, place: int) -> fx.Node:
    return _add(graph, at, operator.getitem, (source, place))


def _shaped_like(graph: fx.Graph, at: fx.Node, node: fx.Node, like: fx.Node) -> fx.Node:
    shape = [int(size) for size in like.meta["val"].shape]
    return (
        node if list(node.meta["val"].shape) == shape else _add(graph, at, aten.view.default, (node, shape))
    )


def _erase(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Erase nodes that nothing reads any more, and their inputs as far as those lose their last reader."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    waiting = set(nodes)
    for user in [u for node in nodes for u in _views_of(node)]:
        waiting.add(user)
    while waiting:
        node = max(waiting, key=lambda each: places.get(each, -1))
        waiting.remove(node)
        if node.users or node.op != "call_function":
            continue
        waiting.update(node.all_input_nodes)
        graph.erase_node(node)


def _views_of(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if is_view_op(user.target) or user.target in PRODUCTS_BACK:
            yield user
            yield from _views_of(user)
