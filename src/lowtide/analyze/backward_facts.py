"""How a backward pass differs from the captured one: order of ops, writes over inputs, chains in chunks.

- `backward_order`: weight gradients first, which shortens live ranges
- `overwrites`: ops that write their result over an input that nothing reads later
- `add_chunked_remats`: chains of pointwise ops that can run as one op, in chunks
"""

import contextlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.analyze.analysis import Analysis, GraphAnalysis
from lowtide.facts import Remat
from lowtide.ops.calls import Call
from lowtide.ops.in_place import ROUND_ONCE, WITH_OUT, keeps_bits, overwriting
from lowtide.ops.live_ranges import live_bytes, storages_of
from lowtide.ops.loss_chunks import LOSS_GRADIENTS
from lowtide.ops.packing import layout_of
from lowtide.ops.pointwise_chunks import in_chunks, replaced_ops
from lowtide.ops.random_ops import is_random
from lowtide.ops.schema import is_view_op, talks_to_others, writes_inputs
from lowtide.remat import RematRule, chain_rules
from lowtide.torch_compat.dispatch import iter_tensors
from lowtide.trace.segments import Segment

DETACH = torch.ops.aten.detach.default

NO_CALLS: Mapping[fx.Node, Call] = {}


def backward_order(segment: Segment, leaving: Collection[fx.Node] = ()) -> Sequence[fx.Node]:
    """The backward ops of a segment in the order to run them: weight gradients first, if that lowers the
    peak.

    Autograd computes the gradient of a layer's input before the gradients of its parameters, so that the
    layer's input stays live meanwhile. In the other order the input is freed first:

        captured    grad of input  | grad of weight     live at "|": input, both incoming and new gradient
        reordered   grad of weight | grad of input      live at "|": incoming gradient, grad of weight

    Preserves each op's inputs, and the order in which gradients are final, which fills the buckets of
    DistributedDataParallel. The results `leaving` leave the graph as soon as they are made.
    """
    captured = segment.backward_ops
    returned = [node for node in segment.results if node is not None and node not in leaving]
    reordered = _reordered(captured, {node for node in segment.gradients if node is not None})
    live = [live_bytes(ops, uncounted=segment.primals, results=returned) for ops in (captured, reordered)]
    before, after = ((max(each, default=0), sum(each)) for each in live)
    return reordered if after < before else captured


def _reordered(ops: Sequence[fx.Node], grads: set[fx.Node]) -> list[fx.Node]:
    """Move each op that feeds only one gradient to right after its last input."""
    index = {node: i for i, node in enumerate(ops)}
    feeds_one = _feeding_one(ops, grads)
    place = dict(index)

    def after_inputs(node: fx.Node, least: int) -> int:
        return max([least, *(place[source] for source in node.all_input_nodes if source in index)])

    for node in ops:
        if node in feeds_one:
            place[node] = after_inputs(node, -1)
    for node in reversed(ops):
        if place[node] < 0:  # reads only forward values: goes right before its first reader
            users = (place[user] for user in node.users if user in index and place[user] >= 0)
            place[node] = min(users, default=index[node])
    last = -1
    for node in ops:
        if node in grads:
            place[node] = last = max(place[node], last)
    for node in ops:
        if node in feeds_one:
            place[node] = after_inputs(node, place[node])
    return sorted(ops, key=lambda node: (place[node], index[node]))


def _feeding_one(ops: Sequence[fx.Node], grads: set[fx.Node]) -> set[fx.Node]:
    """Ops that feed at most one gradient, and that may move."""
    fed: dict[fx.Node, set[fx.Node]] = {}
    for node in reversed(ops):
        mine = {node} & grads
        for user in node.users:
            mine |= fed.get(user, set())
            if len(mine) > 1:
                break
        fed[node] = mine
    return {node for node in ops if len(fed[node]) < 2 and _may_move(node)}


def _may_move(node: fx.Node) -> bool:
    return not (is_random(node) or writes_inputs(node.target) or talks_to_others(node.target))


def overwrites(
    segment: Segment, backward: Sequence[fx.Node], calls: Mapping[fx.Node, Call] = NO_CALLS
) -> dict[fx.Node, Call]:
    """For ops that can write their result over an input: the calls that do so, in the order `backward`.

    `calls` replace some ops, each together with the `replaced_ops` of the op. A call has nodes of the graph
    among its arguments.
    """
    return BackwardOrder(segment, backward).overwrites(calls) if segment.differentiable else {}


def sums_in_place(segment: Segment) -> set[fx.Node]:
    """The sums of gradients in which eager's autograd adds to the first gradient that nothing else reads."""
    order = BackwardOrder(segment, segment.backward_ops)
    sums = [node for node in order.ops if node.meta.get("is_gradient_acc")]
    return {
        node
        for node in sums
        if order.overwriting_call(node) is not None and not is_view_of_gradient(node.args[0])
    }


def is_view_of_gradient(value: Any) -> bool:
    """Whether a gradient is a view. In eager, a view refers to its base, so that autograd adds nothing to it
    in place."""
    return isinstance(value, fx.Node) and value.target is not DETACH and is_view_op(value.target)


class BackwardOrder:
    """The backward ops of a graph in one order: the nodes that refer to each storage, and its last read."""

    def __init__(self, segment: Segment, ops: Sequence[fx.Node]) -> None:
        graph = segment.joint.graph
        self.ops, self.forward = ops, set(segment.forward_ops)
        ordered = (*graph.find_nodes(op="placeholder"), *segment.forward_ops, *ops, *graph.nodes)
        self.position = {node: index for index, node in enumerate(dict.fromkeys(ordered))}
        self.keys = {node: list(storages_of(node)) for node in graph.nodes}
        self.returned = {key for node in segment.results if node for key in self.keys[node]}
        self.loss_gradients = [node for node in ops if node.target in LOSS_GRADIENTS]
        self.referrers: dict[int, list[fx.Node]] = {}
        for node, keys in self.keys.items():
            for key in keys:
                self.referrers.setdefault(key, []).append(node)

    def overwrites(self, calls: Mapping[fx.Node, Call] = NO_CALLS) -> dict[fx.Node, Call]:
        """See the function `overwrites`."""
        with contextlib.ExitStack() as chains:
            for end in calls:
                chains.enter_context(self.as_one(end, replaced_ops(end)))
            found = {node: self.overwriting_call(node, calls.get(node)) for node in self.ops}
        return {node: call for node, call in found.items() if call is not None}

    @contextlib.contextmanager
    def as_one(self, end: fx.Node, replaced: Collection[fx.Node]) -> Iterator[None]:
        """A context in which the ops `replaced` run at the position of `end`."""
        before = {node: self.position[node] for node in replaced}
        self.position.update(dict.fromkeys(replaced, self.position[end]))
        yield
        self.position.update(before)

    def overwriting_call(self, node: fx.Node, call: Call | None = None) -> Call | None:
        """The call by which a node writes its result over an input; None where it may not.

        A node may write over a backward value that no later op reads. It may write over a forward value only
        if no later op of backward reads anything that depends on the value: then no plan recomputes the
        value. `call` runs in place of the node's own op.
        """
        if call is not None and call.target is in_chunks:
            for place, value in enumerate(call.args[1]):
                if self._may_replace(value, node, reads=call.args[1]) and self._is_made_backward(value):
                    return Call(in_chunks, call.args, {"over": place})
            return None
        for place in WITH_OUT[node.target][1] if node.target in WITH_OUT else ():
            value = node.args[place]
            if not isinstance(value, fx.Node) or not self._may_replace(value, node):
                continue
            if self._is_made_backward(value) or (
                node.target in LOSS_GRADIENTS and self._is_never_recomputed(value, node)
            ):
                return overwriting(node.target, place, node.args, dict((call or node).kwargs))
        return None

    def affected_by(self, end: fx.Node, replaced: Collection[fx.Node]) -> set[fx.Node]:
        """Other ops whose `overwriting_call` can change when `replaced` run at the position of `end`: readers
        of the same storages, and ops that may write over a forward value."""
        touched = [source for node in replaced for source in (node, *node.all_input_nodes)]
        keys = {key for node in touched for key in self.keys[node]}
        readers = {user for key in keys for referrer in self.referrers[key] for user in referrer.users}
        return readers.union(self.loss_gradients) - self.forward - {end, *replaced}

    def _may_replace(self, value: fx.Node, reader: fx.Node, *, reads: Sequence[fx.Node] = ()) -> bool:
        """Whether the result of `reader` fits over `value`, and `reader` is the last reader of its storage.

        A reader that lists all its `reads` may read `value` several times."""
        keys, referrers = self.keys[value], self._referrers(value)
        if not keys or any(key in self.returned for key in keys):
            return False
        if any(node.op != "call_function" for node in referrers):
            return False
        others = [source for source in reads or reader.all_input_nodes if source is not value]
        is_read_twice = not reads and sum(arg is value for arg in reader.args) > 1
        if is_read_twice or any(source in referrers for source in others):
            return False
        last = max(self.position[user] for node in referrers for user in node.users)
        return last == self.position[reader] and _fits_over(value, reader)

    def _is_made_backward(self, value: fx.Node) -> bool:
        """Whether the first node that refers to the storage of `value` runs in backward."""
        return min(self._referrers(value), key=self.position.__getitem__) not in self.forward

    def _is_never_recomputed(self, value: fx.Node, reader: fx.Node) -> bool:
        """Whether no op of backward after `reader` reads anything that depends on a forward value."""
        stack, seen = self._referrers(value), set[fx.Node]()
        while stack:
            node = stack.pop()
            for user in node.users:
                if user in self.forward and user not in seen:
                    seen.add(user)
                    stack.append(user)
                elif user.op != "output" and self.position[user] > self.position[reader]:
                    return False
        return True

    def _referrers(self, value: fx.Node) -> list[fx.Node]:
        keys = self.keys[value]
        return list(dict.fromkeys(itertools.chain.from_iterable(self.referrers[key] for key in keys)))


def _fits_over(value: fx.Node, result: fx.Node) -> bool:
    """Whether a result has the dtype and strides of a value, and kernels visit memory in the same order.

    The order does not matter for ops that round once; `alpha` of a sum is a second rounding.
    """
    here, there = value.meta.get("val"), result.meta.get("val")
    if not isinstance(here, Tensor) or not isinstance(there, Tensor) or here.dtype is not there.dtype:
        return False
    if not keeps_bits(result.target, here.dtype, result.kwargs):
        return False
    layout = layout_of(here)
    orders = {
        tensor.stride()
        for source in result.all_input_nodes
        for tensor in iter_tensors(source.meta.get("val"))
        if tensor.layout is torch.strided and tensor.shape == here.shape
    }
    in_any_order = result.target in (*ROUND_ONCE, *LOSS_GRADIENTS) and not result.kwargs
    return layout is not None and layout == layout_of(there) and (in_any_order or len(orders) == 1)


def add_chunked_remats(
    analysis: Analysis, state: GraphAnalysis, order: BackwardOrder, written_over: Collection[fx.Node]
) -> None:
    """Add to the last op of each chain in backward the remats that run the chain in chunks.

    `written_over` are the ops that write over an input where all ops run one by one. A chain is left out if
    another op could then no longer write over its input, or if the chain reads a value that the step changes
    in place.
    """
    done: set[fx.Node] = set()
    for end in reversed(order.ops):
        rules = [] if end in done or end not in state.rank else chain_rules(end)
        if not rules:
            continue
        replaced = replaced_ops(end)
        done.update(replaced)
        with order.as_one(end, replaced):
            others = order.affected_by(end, replaced)
            is_free = all((order.overwriting_call(op) is None) == (op not in written_over) for op in others)
            found = [_chunked_remat(analysis, state, end, rule, order) for rule in rules] if is_free else []
        rank = state.rank[end]
        remats = tuple(remat for remat in found if remat is not None)
        analysis.nodes[rank] = replace(analysis.nodes[rank], remats=remats)


def _chunked_remat(
    analysis: Analysis, state: GraphAnalysis, end: fx.Node, rule: RematRule, order: BackwardOrder
) -> Remat | None:
    call = rule.call(end, ())
    sources: dict[fx.Node, None] = {}
    fx.node.map_arg((call.args, call.kwargs), sources.setdefault)
    if any(state.changed.intersection(state.holds[source]) for source in sources):
        return None
    node = analysis.nodes[state.rank[end]]
    is_over = order.overwriting_call(end, call) is not None
    return Remat(
        rule=rule.name,
        reads=tuple(state.rank[source] for source in sources),
        holds=node.holds,
        makes=node.makes,
        workspace_bytes=-sum(analysis.storages[made].nbytes for made in node.makes) if is_over else 0,
    )
