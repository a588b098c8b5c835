"""Run gradients as soon as they can be, where that lowers what the backward pass holds.

Autograd computes the gradient of a layer's input before those of its parameters, so that the layer's input,
what came into its formula and what goes on are held at once. The other way round, the layer's input is freed
first. No op computes anything else for that, and gradients are still there in eager's order, which fills
the buckets of DistributedDataParallel.
"""

from collections.abc import Sequence

import torch
from torch import fx
from torch.utils import _pytree as pytree

from lowtide.ops.calls import storage_key
from lowtide.ops.random_ops import is_random
from lowtide.ops.schema import talks_to_others, writes_inputs
from lowtide.trace.segments import Segment, results_of
from lowtide.trace.split import split, tangent_outputs


def backward_order(segment: Segment) -> list[fx.Node]:
    """The backward ops of a segment in the order to run them: as captured, where another holds no less at its
    peak, and then on the whole."""
    captured = split(segment)[1]
    tangents = tangent_outputs(segment.joint)
    primals = [node for node in segment.joint.graph.find_nodes(op="placeholder") if node not in tangents]
    results = [node for node in results_of(segment.joint) if node is not None]
    grads = results_of(segment.joint)[segment.num_forward_outputs :]
    early = _reordered(captured, {node for node in grads if node is not None})
    held = [_held(ops, primals, results) for ops in (captured, early)]
    before, after = ((max(some, default=0), sum(some)) for some in held)
    return early if after < before else captured


def _reordered(ops: list[fx.Node], grads: set[fx.Node]) -> list[fx.Node]:
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


def _leading_to_one(ops: list[fx.Node], grads: set[fx.Node]) -> set[fx.Node]:
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
            for key, nbytes in _blocks(source):
                sizes[key], last[key] = nbytes, place
                first.setdefault(key, 0)
        for key, nbytes in _blocks(node):
            sizes[key] = nbytes
            first.setdefault(key, place)
            last.setdefault(key, place)
    for node in results:
        last.update((key, len(ops) - 1) for key, _ in _blocks(node) if key in last)
    for node in primals:
        sizes.update((key, 0) for key, _ in _blocks(node) if key in sizes)
    change = [0] * (len(ops) + 1)
    for key, nbytes in sizes.items():
        change[first[key]] += nbytes
        change[last[key] + 1] -= nbytes
    held, found = 0, []
    for more in change[:-1]:
        held += more
        found.append(held)
    return found


def _blocks(node: fx.Node) -> list[tuple[int, int]]:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided)
    return [(storage_key(tensor), tensor.untyped_storage().nbytes()) for tensor in tensors]
