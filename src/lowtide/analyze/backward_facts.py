"""Run gradients as soon as they can be, where that lowers what the backward pass holds.

Autograd computes the gradient of a layer's input before those of its parameters, so that the layer's input,
what came into its formula and what goes on are held at once. The other way round, the layer's input is freed
first. No op computes anything else for that, and gradients are still there in eager's order, which fills
the buckets of DistributedDataParallel.

Backward ops that write their result over a value which nothing reads after them.

Ways to run backward ops other than one by one, whole: remats that stand in for what leads to them.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from lowtide.analyze.analysis import Analysis, GraphAnalysis
from lowtide.facts import Remat
from lowtide.ops.calls import Call
from lowtide.ops.in_place import ROUND_ONCE, WITH_OUT, overwriting
from lowtide.ops.loss_chunks import LOSS_GRADIENTS
from lowtide.ops.packing import layout_of
from lowtide.ops.pointwise_chunks import in_chunks, replaced_ops
from lowtide.ops.random_ops import is_random
from lowtide.ops.schema import talks_to_others, writes_inputs
from lowtide.remat import chain_rules
from lowtide.torch_compat.dispatch import storage_key
from lowtide.trace.segments import Segment
from lowtide.trace.tangents import stands_for


def backward_order(segment: Segment) -> Sequence[fx.Node]:
    """The backward ops of a segment in the order to run them: as captured, where another holds no less at its
    peak, and then on the whole."""
    captured = segment.backward_ops
    results = [node for node in segment.results if node is not None]
    grads = segment.gradients
    early = _reordered(captured, {node for node in grads if node is not None})
    held = [_held(ops, segment.primals, results) for ops in (captured, early)]
    before, after = ((max(some, default=0), sum(some)) for some in held)
    return early if after < before else captured


def _reordered(ops: Sequence[fx.Node], grads: set[fx.Node]) -> list[fx.Node]:
    """Ops that lead to one gradient alone, each right behind the last of the others that it waits for."""
    index = {node: i for i, node in enumerate(ops)}
    alone = _leading_to_one(ops, grads)
    moment = dict(index)
    for node in ops:
        if node in alone:
            moment[node] = max(
                (moment[source] for source in node.all_input_nodes if source in index), default=-1
            )
    for node in reversed(ops):
        if moment[node] < 0:  # reads forward values alone: not before it is read
            moment[node] = min(
                (moment[user] for user in node.users if user in index and moment[user] >= 0),
                default=index[node],
            )
    last = -1
    for node in ops:
        if node in grads:
            moment[node] = last = max(moment[node], last)
    for node in ops:
        if node in alone:
            moment[node] = max([moment[node], *(moment[s] for s in node.all_input_nodes if s in index)])
    return sorted(ops, key=lambda node: (moment[node], index[node]))


def _leading_to_one(ops: Sequence[fx.Node], grads: set[fx.Node]) -> set[fx.Node]:
    """Ops of which at most one gradient is made, and which may change places with others."""
    leads: dict[fx.Node, set[fx.Node]] = {}
    for node in reversed(ops):
        mine = {node} & grads
        for user in node.users:
            mine |= leads.get(user, set())
            if len(mine) > 1:
                break
        leads[node] = mine
    return {node for node in ops if len(leads[node]) < 2 and _may_move(node)}


def _may_move(node: fx.Node) -> bool:
    return not (is_random(node) or writes_inputs(node.target) or talks_to_others(node.target))


def _held(ops: Sequence[fx.Node], primals: Sequence[fx.Node], results: Sequence[fx.Node]) -> list[int]:
    """Bytes at each op of what ops make and of the forward values that they still read, without what is
    there throughout."""
    sizes: dict[int, int] = {}
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    for place, node in enumerate(ops):
        for source in node.all_input_nodes:
            for key, nbytes in _storages(source):
                sizes[key], last[key] = nbytes, place
                first.setdefault(key, 0)
        for key, nbytes in _storages(node):
            sizes[key] = nbytes
            first.setdefault(key, place)
            last.setdefault(key, place)
    for node in results:
        last.update((key, len(ops) - 1) for key, _ in _storages(node) if key in last)
    for node in primals:
        sizes.update((key, 0) for key, _ in _storages(node) if key in sizes)
    change = [0] * (len(ops) + 1)
    for key, nbytes in sizes.items():
        change[first[key]] += nbytes
        change[last[key] + 1] -= nbytes
    held, found = 0, []
    for more in change[:-1]:
        held += more
        found.append(held)
    return found


def _storages(node: fx.Node) -> list[tuple[int, int]]:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided)
    return [(storage_key(tensor), tensor.untyped_storage().nbytes()) for tensor in tensors]


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
    forward = segment.forward_ops
    blocks = _Storages(segment, [*forward, *backward])
    for node in calls:
        blocks.run_with(node, replaced_ops(node))
    made_forward = set(forward)
    found: dict[fx.Node, Call] = {}
    for node in backward:
        if node in calls and calls[node].target is in_chunks:
            over = _over(calls[node], node, blocks, made_forward)
            if over is not None:
                found[node] = Call(in_chunks, calls[node].args, {"over": over})
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


def _over(call: Call, node: fx.Node, blocks: "_Storages", forward: set[fx.Node]) -> int | None:
    """Which of its inputs a program can write its result over."""
    for place, value in enumerate(call.args[1]):
        if (
            blocks.ends_with(value, node, call.args[1])
            and _same(value, node)
            and blocks.maker(value) not in forward
        ):
            return place
    return None


class _Storages:
    """Which nodes of a graph hold each block of memory, and where each is read last."""

    def __init__(self, segment: Segment, ops: Sequence[fx.Node]) -> None:
        graph = segment.joint.graph
        ordered = (*graph.find_nodes(op="placeholder"), *ops, *graph.nodes)
        self.position = {node: index for index, node in enumerate(dict.fromkeys(ordered))}
        self.returned = {key for node in segment.results if node for key in _keys(node)}
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


def add_chunked_remats(
    analysis: Analysis, state: GraphAnalysis, ops: Sequence[fx.Node], written_over: Mapping[fx.Node, Call]
) -> None:
    """Add remats to the backward ops `ops` of a graph, which run in this order; `written_over` is what they
    call where they do so one by one.

    A chain is left out where another op could not write over what it reads any more, and where it would read
    what the step changes in place.
    """
    done: set[fx.Node] = set()
    for end in reversed(ops):
        fit = [] if end in done or state.rank.get(end) is None else chain_rules(end)
        if not fit:
            continue
        inner = replaced_ops(end)
        done.update(inner)
        ran = [node for node in ops if node not in inner]
        remats = []
        for rule in fit:
            call = rule.call(end, ())
            over = overwrites(state.segment, ran, {end: call})
            if {*over, end, *inner} == {*written_over, end, *inner}:
                remats.append(_chunked_remat(analysis, state, end, call, rule.name, is_over=end in over))
        rank = state.rank[end]
        analysis.nodes[rank] = replace(analysis.nodes[rank], remats=tuple(r for r in remats if r))


def _chunked_remat(
    analysis: Analysis, state: GraphAnalysis, end: fx.Node, call: Call, rule: str, *, is_over: bool
) -> Remat | None:
    node = analysis.nodes[state.rank[end]]
    sources: dict[fx.Node, None] = {}
    fx.node.map_arg((call.args, call.kwargs), sources.setdefault)
    if any(state.changed.intersection(state.holds[source]) for source in sources):
        return None
    saved_bytes = sum(analysis.storages[made].nbytes for made in node.makes) if is_over else 0
    return Remat(
        rule=rule,
        reads=tuple(state.rank[source] for source in sources),
        holds=node.holds,
        makes=node.makes,
        workspace_bytes=-saved_bytes,
    )
