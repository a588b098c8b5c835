"""Parameters that the optimizer updates inside the backward pass, and where their gradients are final."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from torch import Tensor, fx

from lowtide.ops.calls import storage_key
from lowtide.ops.packing import layout_of
from lowtide.trace.segments import Segment, results_of

Order = Sequence[tuple[fx.Node, Iterable[fx.Node]]]
"""What a backward pass runs, one after the other: the value that each makes, and what it reads."""


def updated(segment: Segment, parameters: Collection[int]) -> dict[int, fx.Node]:
    """Of the graph's inputs that are among `parameters` (by identity), those that can be updated as soon as
    their gradient is final, with that gradient: one that has a block of memory to itself."""
    if not parameters:
        return {}
    grads = results_of(segment.joint)[segment.num_forward_outputs :]
    results = [node for node in results_of(segment.joint) if node is not None]
    shared = Counter(storage_key(node.meta["val"]) for node in results if _is_tensor(node))
    found = {}
    for index, (grad, origin) in enumerate(zip(grads, segment.origins, strict=False)):
        if grad is None or origin.tensor not in parameters or grad.op != "call_function":
            continue
        value = grad.meta["val"]
        if shared[storage_key(value)] == 1 and layout_of(value) is not None:
            found[index] = grad
    return found


def update_places(segment: Segment, order: Order, grads: dict[int, fx.Node]) -> dict[int, list[int]]:
    """After which place of `order` each input can be updated: nothing reads it, or its gradient, any more."""
    if not grads:
        return {}
    inputs = segment.joint.graph.find_nodes(op="placeholder")
    keys = {index: {_key(inputs[index]), _key(grad)} for index, grad in grads.items()}
    wanted = set[int]().union(*keys.values())
    last: dict[int, int] = {}
    for place, (made, reads) in enumerate(order):
        for node in (made, *reads):
            key = _key(node)
            if key in wanted:
                last[key] = place
    places: dict[int, list[int]] = {}
    for index in grads:
        places.setdefault(max(last.get(key, 0) for key in keys[index]), []).append(index)
    return places


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _key(node: fx.Node) -> int:
    return storage_key(node.meta["val"]) if _is_tensor(node) else 0
