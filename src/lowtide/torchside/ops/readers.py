"""Who reads a value of a graph, directly or by another look at it."""

from collections.abc import Iterator

from torch import fx

from lowtide.torchside.ops.schema import is_view_op


def readers(value: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Every node that reads `value` or a view of it and is no view itself, with the one that it reads."""
    stack = [value]
    while stack:
        one = stack.pop()
        for user in one.users:
            if is_view_op(user.target):
                stack.append(user)
            else:
                yield user, one


def is_backward(node: fx.Node) -> bool:
    """Whether torch made a node for the backward pass."""
    return str(node.meta.get("partitioner_tag", "")) == "is_backward"


def read_in_backward(value: fx.Node) -> bool:
    return any(is_backward(reader) for reader, _ in readers(value))
