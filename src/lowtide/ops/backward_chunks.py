"""Chains of pointwise ops of the backward pass, run in slices together with the forward ops that they need.

The gradient of a formula written by hand (a GELU, say) is a dozen ops that hold several values of the size of
their input at once, besides the forward values that they read. As one program over slices, it needs the
formula's input and the gradient of its result alone, and may write over that gradient.
"""

import torch
from torch import fx

from lowtide.ops.dropout import apply_mask
from lowtide.ops.pointwise_chunks import MOST_OPS, POINTWISE, Program, in_order, is_pointwise, written_out
from lowtide.ops.schema import is_backward, is_view_op, readers

aten = torch.ops.aten

POINTWISE_BACKWARD = POINTWISE | {
    aten.elu_backward.default,
    aten.gelu_backward.default,
    aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default,
    aten.sigmoid_backward.default,
    aten.silu_backward.default,
    aten.softplus_backward.default,
    aten.tanh_backward.default,
    aten.threshold_backward.default,
    apply_mask,
}
"""Ops of the backward pass that give the same bits in slices as whole: tried in
`tests/torchside/test_backward_chains.py`."""


def backward_program(end: fx.Node) -> tuple[Program, list[fx.Node]] | None:
    """How the result of a backward op is made in slices, and of what; None where that would hold no less."""
    backward = _backward_part(end)
    if not backward:
        return None
    inside = _with_forward(end, backward)
    order = in_order(end, inside)
    return written_out(order) if len(order) > 1 and _holds_less(order) else None


def stood_in_for(end: fx.Node) -> list[fx.Node]:
    """The backward ops that need not run where the program of `end` does, without `end` itself."""
    return [node for node in in_order(end, _backward_part(end)) if node is not end]


def _backward_part(end: fx.Node) -> set[fx.Node]:
    """The pointwise ops that lead to `end` and to nothing else, and that run right before it."""
    if not _fits(end, end) or is_view_op(end.target):
        return set()
    found = {end}
    waiting = list(end.all_input_nodes)
    while waiting:
        source = waiting.pop()
        if source in found or len(found) >= MOST_OPS or not _fits(source, end):
            continue
        if all(user in found for user in source.users):
            found.add(source)
            waiting += source.all_input_nodes
    # what they read would be held for longer, if they had to wait for others
    near = {end}
    node = end.prev
    while node.op == "call_function" and (not is_backward(node) or is_view_op(node.target) or node in found):
        near.add(node)
        node = node.prev
    return found & near


def _fits(node: fx.Node, end: fx.Node) -> bool:
    return is_pointwise(node, end, ops=POINTWISE_BACKWARD, backward=True)


def _with_forward(end: fx.Node, backward: set[fx.Node]) -> set[fx.Node]:
    """These, and forward ops that can run again among them so that fewer values are read in all."""
    inside = set(backward)
    read = _read_whole(inside)
    found = {value: _cone(value, end) for value in read if is_pointwise(value, end)}
    cones = {value: cone for value, cone in found.items() if cone}
    everything = inside.union(*cones.values())
    if len(_read_whole(everything)) < len(read) and len(everything) <= MOST_OPS:
        return everything
    for cone in cones.values():
        more = inside | cone
        if len(_read_whole(more)) < len(_read_whole(inside)) and len(more) <= MOST_OPS:
            inside = more
    return inside


def _cone(value: fx.Node, end: fx.Node) -> set[fx.Node]:
    """The forward pointwise ops that a value is made by, as far as they go; none where they go too far."""
    found: set[fx.Node] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if node not in found and is_pointwise(node, end):
            found.add(node)
            waiting += node.all_input_nodes
        if len(found) > MOST_OPS // 2:
            return set()
    return found


def _read_whole(inside: set[fx.Node]) -> list[fx.Node]:
    """What these ops read of others and is no single number; in the order of the graph's names."""
    found = {
        source
        for node in inside
        for source in node.all_input_nodes
        if source not in inside and source.meta["val"].dim()
    }
    return sorted(found, key=lambda node: node.name)


def _holds_less(order: list[fx.Node]) -> bool:
    """Whether something is left out that ops one by one, each over its gradient, would have to hold."""
    if not all(is_backward(node) for node in order):
        return True
    inside = set(order)
    values = [*_read_whole(inside), *order]
    return any(
        sum(reader in inside for reader, _ in readers(value)) > 1 for value in values if is_backward(value)
    )
