"""Backward ops that write their result over a value which nothing reads after them."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from lowtide.ops.backward_chunks import stood_in_for
from lowtide.ops.calls import Call, storage_key
from lowtide.ops.in_place import ROUND_ONCE, WITH_OUT, overwriting
from lowtide.ops.loss_chunks import LOSS_GRADIENTS
from lowtide.ops.packing import layout_of
from lowtide.ops.pointwise_chunks import in_slices
from lowtide.trace.segments import Segment, results_of
from lowtide.trace.split import split, stands_for

NO_CALLS: Mapping[fx.Node, Call] = {}


def overwrites(
    segment: Segment, backward: Sequence[fx.Node], calls: Mapping[fx.Node, Call] = NO_CALLS
) -> dict[fx.Node, Call]:
    """What such ops call instead where the backward ops run in the order `backward`; nodes of the graph are
    among the arguments. `calls` are what some of them run in another way, in the place of others, too.

    A value can be written over that the backward pass makes. A forward value can be where nothing that
    depends on it is read later in backward, so that no plan brings it back to read it there.
    """
    if not segment.differentiable:
        return {}
    forward = split(segment)[0]
    blocks = _Blocks(segment, [*forward, *backward])
    for node in calls:
        blocks.run_with(node, stood_in_for(node))
    made_forward = set(forward)
    found: dict[fx.Node, Call] = {}
    for node in backward:
        if node in calls and calls[node].target is in_slices:
            over = _over(calls[node], node, blocks, made_forward)
            if over is not None:
                found[node] = Call(in_slices, calls[node].args, {"over": over})
            continue
        for place in WITH_OUT[node.target][1] if node.target in WITH_OUT else ():
            value = node.args[place]
            if not isinstance(value, fx.Node) or not blocks.ends_with(value, node) or not _same(value, node):
                continue
            if blocks.maker(value) not in made_forward or (
                node.target in LOSS_GRADIENTS and blocks.is_forgotten(value, node, made_forward)
            ):
                kwargs = calls[node].kwargs if node in calls else node.kwargs
                found[node] = overwriting(node.target, place, node.args, dict(kwargs))
                break
    return found


def _over(call: Call, node: fx.Node, blocks: "_Blocks", forward: set[fx.Node]) -> int | None:
    """Which of its inputs a program can write its result over."""
    for place, value in enumerate(call.args[1]):
        if (
            blocks.ends_with(value, node, call.args[1])
            and _same(value, node)
            and blocks.maker(value) not in forward
        ):
            return place
    return None


class _Blocks:
    """Which nodes of a graph hold each block of memory, and where each is read last."""

    def __init__(self, segment: Segment, ops: Sequence[fx.Node]) -> None:
        graph = segment.joint.graph
        ordered = (*graph.find_nodes(op="placeholder"), *ops, *graph.nodes)
        self.position = {node: index for index, node in enumerate(dict.fromkeys(ordered))}
        self.returned = {key for node in results_of(segment.joint) if node for key in _keys(node)}
        self.holders: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            for key in _keys(node):
                self.holders.setdefault(key, []).append(node)

    def maker(self, value: fx.Node) -> fx.Node:
        """The first that holds the block of `value`; all others only look at it."""
        return min(self._holders(value), key=self.position.__getitem__)

    def run_with(self, node: fx.Node, others: Iterable[fx.Node]) -> None:
        """Let what `others` read be read where `node` runs."""
        for other in others:
            self.position[other] = self.position[node]

    def ends_with(self, value: fx.Node, reader: fx.Node, reads: Sequence[fx.Node] | None = None) -> bool:
        """Whether `reader` is the last that reads the block of `value`, and reads nothing else of it; it may
        read `value` itself as often as it likes where `reads` are all that it reads."""
        if not _keys(value) or any(key in self.returned for key in _keys(value)):
            return False
        holders = self._holders(value)
        if any(node.op != "call_function" for node in holders):
            return False
        others = [source for source in reads or reader.all_input_nodes if source is not value]
        if any(source in holders for source in others) or (reads is None and _count(reader, value) > 1):
            return False
        last = max(self.position[user] for node in holders for user in node.users)
        return last == self.position[reader]

    def is_forgotten(self, value: fx.Node, reader: fx.Node, forward: set[fx.Node]) -> bool:
        """Whether nothing that is made of a forward value is read in backward after `reader`."""
        stack, seen = self._holders(value), set[fx.Node]()
        while stack:
            node = stack.pop()
            for user in node.users:
                if user in forward and user not in seen:
                    seen.add(user)
                    stack.append(user)
                elif user.op != "output" and self.position[user] > self.position[reader]:
                    return False
        return True

    def _holders(self, value: fx.Node) -> list[fx.Node]:
        keys = _keys(value)
        return list(dict.fromkeys(itertools.chain.from_iterable(self.holders[key] for key in keys)))


def _keys(node: fx.Node) -> list[int]:
    """The blocks that a node's value refers to, and those that it took the place of."""
    return [storage_key(tensor) for tensor in (*_tensors(node), *stands_for(node))]


def _tensors(node: fx.Node) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            yield leaf


def _same(value: fx.Node, result: fx.Node) -> bool:
    """Whether a result fits exactly over a value, and is computed in the same order in memory, unless that
    does not matter: `alpha` of a sum is a second rounding."""
    here, there = value.meta.get("val"), result.meta.get("val")
    if not isinstance(here, Tensor) or not isinstance(there, Tensor) or here.dtype is not there.dtype:
        return False
    layout = layout_of(here)
    alike = [
        (tensor.shape, tensor.stride())
        for source in result.all_input_nodes
        for tensor in _tensors(source)
        if tensor.shape == here.shape
    ]
    in_any_order = result.target in (*ROUND_ONCE, *LOSS_GRADIENTS) and not result.kwargs
    return layout is not None and layout == layout_of(there) and (in_any_order or len(set(alike)) == 1)


def _count(reader: fx.Node, value: fx.Node) -> int:
    return sum(arg is value for arg in reader.args)
