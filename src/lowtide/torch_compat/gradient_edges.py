"""Edges of autograd's graph: how many terms the gradient of a tensor has, and who gets them.

Autograd adds the gradients of a tensor one by one, from the last use to the first. A planned graph is one
node, which returns the sum of its own uses. Where the loop uses the tensor later as well, eager has

    ((loop + second use) + first use)        and not        loop + (second use + first use)

So the node of the loop's use hands its gradient to the graph instead of to autograd's sum, and the graph
begins its own sum with it. An input of a graph that needs this passes through a node, its `Receiver`:

    weight ──┬── receiver ── graph ──┐                 backward:   loss -> penalty -> receiver.so_far
             └── penalty ────────────┴── loss                      loss -> graph, with so_far -> weight

As long as a receiver lives, every backward pass begins with a look for uses of the tensors that receivers
read. Two uses are only told of: those of a view of an input that the graph returns, which eager adds in the
middle of the graph's own, and casts by autocast outside of the graph, which eager shares with the graph.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.torch_compat.autograd_engine import ProcessPatch, creation_order, graph_is_kept, is_leaf_node

Edge = tuple[Any, int]
"""A node of autograd, and the number of its input."""


class Use(NamedTuple):
    """A node of autograd that gives a gradient to a tensor, as the node's result `place`."""

    node: Any
    place: int

    @property
    def order(self) -> int:
        return creation_order(self.node)


def edge_of(tensor: Any) -> Edge | None:
    """The edge to a tensor that is no leaf; None for a leaf."""
    if isinstance(tensor, Tensor):
        return None if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)
    return tensor.node, tensor.output_nr  # a GradientEdge


def uses_behind(roots: Iterable[Any], *, since: int = 0) -> dict[Edge, list[Use]]:
    """The uses of every tensor behind the tensors `roots`, from those made at `since` on."""
    found: dict[Edge, list[Use]] = {}
    stack = [edge[0] for root in roots if (edge := edge_of(root)) is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if is_leaf_node(node) or creation_order(node) < since:
            continue
        for place, (source, number) in enumerate(node.next_functions):
            if source is None:
                continue
            found.setdefault((source, number), []).append(Use(node, place))
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return found


def numbers_of_terms(roots: Iterable[Any], inputs: Sequence[Tensor]) -> list[int]:
    """For each input, the number of gradients that autograd adds up in a backward pass from `roots`."""
    uses = uses_behind(roots)
    leaves = {id(node.variable): users for (node, _), users in uses.items() if is_leaf_node(node)}
    found = [
        leaves.get(id(tensor), []) if (edge := edge_of(tensor)) is None else uses.get(edge, [])
        for tensor in inputs
    ]
    return [
        len(uses.get((users[0].node, 0), ())) if len(users) == 1 and passes_sum(users[0].node) else len(users)
        for users in found
    ]


def passes_sum(node: Any) -> bool:
    """Whether a node only passes a sum on to an input of a graph, whose gradient it is (`dtensor`)."""
    return bool(getattr(node, "passes_sum", False))


class Receiver:
    """The gradient that later uses of one input give to a graph; an attribute of the input's node.

    `view_is_used` is called where the loss uses a view of the input that the graph returns.
    """

    def __init__(self, place: int, like: Tensor, view_is_used: Callable[[], None]) -> None:
        self.place, self.view_is_used = place, view_is_used
        self._shape, self._dtype = like.shape, like.dtype
        self._so_far: Tensor | None = None
        self._is_own = False
        self._made: tuple[torch.Stream, torch.Event] | None = None

    def add(self, gradient: Tensor) -> None:
        """Add the gradient of one more use, as autograd's engine does."""
        if gradient.shape != self._shape:
            gradient = gradient.sum_to_size(self._shape)
        if gradient.dtype != self._dtype:
            gradient = (gradient.real if _is_half_too_much(gradient, self._dtype) else gradient).to(
                self._dtype
            )
        self._wait()
        if self._so_far is None:
            self._so_far = gradient
        elif self._is_own and not gradient.is_sparse:
            self._so_far.add_(gradient)
        else:
            self._so_far, self._is_own = total(self._so_far, gradient), not self._so_far.is_sparse
        if gradient.device.type != "cpu":
            stream = torch.accelerator.current_stream(gradient.device)
            self._made = stream, stream.record_event()

    def take(self) -> Tensor | None:
        """The sum so far, which leaves the receiver."""
        self._wait()
        taken, self._so_far, self._is_own, self._made = self._so_far, None, False, None
        return taken

    def _wait(self) -> None:
        """Let the current stream of an accelerator wait for the sum so far, as autograd's engine does."""
        if self._made is None or self._so_far is None:
            return
        stream, event = self._made
        current = torch.accelerator.current_stream(self._so_far.device)
        if current != stream:
            current.wait_event(event)
            self._so_far.record_stream(current)


def _is_half_too_much(gradient: Tensor, dtype: torch.dtype) -> bool:
    return gradient.is_complex() and not dtype.is_complex


def total(so_far: Tensor, gradient: Tensor) -> Tensor:
    """A sum of two gradients; torch adds a sparse one only on the right."""
    return gradient + so_far if so_far.is_sparse else so_far + gradient


_RECEIVING: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Nodes of autograd with a `receiver`."""
_CASTING: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Nodes of autograd with a function `cast_is_shared`."""
CAST = "ToCopyBackward0"
"""The class of autograd's node for a cast."""


def will_receive(node: Any, receiver: Receiver) -> None:
    """Let a node of autograd get the gradients of the later uses of the tensor that it reads."""
    node.receiver = receiver
    _RECEIVING.add(node)
    node.release = _HANDED_OVER.hold(node)


def will_cast(node: Any, cast_is_shared: Callable[[], None]) -> None:
    """Call `cast_is_shared` where a backward pass has another cast of the tensor that a node reads."""
    node.cast_is_shared = cast_is_shared
    _CASTING.add(node)
    node.release = _HANDED_OVER.hold(node)


def has_run(node: Any) -> None:
    """Look for no more uses of the tensor that a node reads, unless another backward pass may follow."""
    if not graph_is_kept():
        _RECEIVING.discard(node)
        _CASTING.discard(node)
        node.release()


def receivers_after(nodes: Iterable[Any], is_own: Callable[[Any], bool]) -> Iterator[Receiver]:
    """The receivers of these nodes, and behind those of them that `is_own`."""
    for node in nodes:
        if hasattr(node, "receiver"):
            yield node.receiver
        elif node is not None and is_own(node):
            yield from receivers_after([source for source, _ in node.next_functions], is_own)


class _Inside(threading.local):
    is_planned = False


_INSIDE = _Inside()


@contextmanager
def inside_planned_graph() -> Iterator[None]:
    """The context of a planned graph, whose own backward passes have no receivers."""
    before, _INSIDE.is_planned = _INSIDE.is_planned, True
    try:
        yield
    finally:
        _INSIDE.is_planned = before


def is_inside_planned_graph() -> bool:
    """Whether an op of a planned graph runs in this thread."""
    return _INSIDE.is_planned


def _later_uses(roots: Sequence[Any]) -> dict[Any, dict[int, Any]]:
    """By node that uses a tensor, the node that gets the gradient instead, for each result of the node."""
    since = 0 if _CASTING else min(map(creation_order, _RECEIVING))
    given: dict[Any, dict[int, Any]] = {}
    for (source, _), users in uses_behind(roots, since=since).items():
        if len(users) > 1:
            _tell(source, users)
        receiving = sorted((use for use in users if hasattr(use.node, "receiver")), key=lambda use: use.order)
        for use in users if receiving and len(users) > 1 else ():
            earlier = [other.node for other in receiving if other.order < use.order]
            if earlier:
                given.setdefault(use.node, {})[use.place] = earlier[-1]
    return given


def _tell(source: Any, users: Sequence[Use]) -> None:
    """Tell of uses of a tensor, made by the node `source`, that no graph can take up."""
    # a node that runs a part of a graph's backward pass reads an input by several edges
    if hasattr(source, "receiver") and len({use.node for use in users}) > 1:
        source.receiver.view_is_used()
    if any(type(use.node).__name__ == CAST for use in users):
        for use in users:
            if hasattr(use.node, "cast_is_shared"):
                use.node.cast_is_shared()


def _handing_over(receivers: dict[int, Any]) -> Callable[[Any, Any], Any]:
    """A hook of a node that gives some of its results to `receivers`."""

    def hook(results: tuple[Tensor | None, ...], _given: Any) -> Any:
        left = list(results)
        for place, node in sorted(receivers.items()):
            gradient = left[place]
            if gradient is not None and torch._C._will_engine_execute_node(node):
                node.receiver.add(gradient)
                left[place] = None
        return tuple(left)

    return hook


def _as_uses(roots: Sequence[Any]) -> Sequence[Any]:
    """`roots`, each behind a node of its own where a planned graph reads it: autograd gives a root its
    gradient without a node."""
    read = {
        (source, number)
        for node in _RECEIVING
        for source, number in node.next_functions
        if source is not None
    }
    with torch.enable_grad():
        return tuple(
            root.view_as(root) if isinstance(root, Tensor) and edge_of(root) in read else root
            for root in roots
        )


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if _INSIDE.is_planned or not (_RECEIVING or _CASTING):
            return original(roots, *args, **kwargs)
        roots = _as_uses(roots)
        given = _later_uses(roots)
        hooks = [node.register_hook(_handing_over(receivers)) for node, receivers in given.items()]
        try:
            return original(roots, *args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
            for receivers in given.values():
                for node in receivers.values():
                    node.receiver.take()

    return run


_HANDED_OVER = ProcessPatch(torch.autograd, "_engine_run_backward", _wrap)
