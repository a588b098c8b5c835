"""Gradients of tensors that several graphs use: each leaves its graph as soon as it is made.

Autograd adds the gradients of a tensor one by one. Eager has one sum and one term live at a time. A graph
that returns all gradients at its end would keep them live beside the sums of the later graphs.

So a graph with such inputs runs in parts, from one gradient to the next. Its own node of autograd runs
nothing. A chain of nodes follows, one for each part, which returns the part's gradients to the tensors:

    weight ──┬── node of the last term ── graph          backward:  graph -> first term -> .. -> last term
             └── node of the first term                             each returns its gradient to the weight

`graph_call` has the same for DistributedDataParallel, in the order in which eager fills buckets.
"""

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from lowtide.ops.direct import hand_over
from lowtide.ops.gradient_terms import terms
from lowtide.runtime.graph_call import Chain
from lowtide.torch_compat import aot_autograd
from lowtide.torch_compat.autograd_engine import without_base
from lowtide.trace.segments import results_of

ENTRANCE = -1


class Term(NamedTuple):
    """One of the gradients of an input that autograd adds up. The node of an `is_last` one passes the input
    on to the graph, and has `num_edges` to it."""

    place: int
    number: int
    is_last: bool = False
    num_edges: int = 1

    @property
    def is_entrance(self) -> bool:
        """Whether this is no gradient, but the edge by which the graph's node reaches the chain."""
        return self.number == ENTRANCE


Groups = tuple[tuple[Term, ...], ...]
"""The terms that each part of a backward pass returns."""


class SharedGates(NamedTuple):
    """The terms that each part of a backward pass returns. The graph's own node returns none: `groups[0]` is
    empty."""

    groups: Groups
    num_inputs: int


class _SharedGate(torch.autograd.Function):
    """Runs one part of a backward pass and returns the part's gradients. A token orders these nodes."""

    @staticmethod
    def forward(
        ctx: Any, chain: Chain, group: tuple[Term, ...], _token: torch.Tensor | None, *values: torch.Tensor
    ) -> Any:
        ctx.chain, ctx.group = chain, group
        ctx.set_materialize_grads(False)
        places = _first_edges(group)
        passed = [values[place] for term, place in zip(group, places, strict=True) if term.is_last]
        return (values[0].new_empty(0), *passed)

    @staticmethod
    def backward(ctx: Any, token: Any, *given: Any) -> Any:
        gradients, arrived = ctx.chain.next_gradients(), list(given)
        del given
        results: list[Any] = []
        for term in ctx.group:
            # from the graph's own node, where another pass may follow, or from a view that the graph returns
            if term.is_entrance:
                results.append(arrived.pop(0))
                continue
            edges = _terms_of(arrived.pop(0)) if term.is_last else []
            if gradients is not None and (gradient := gradients.pop(0)) is not None:
                edges.append(without_base(gradient))
                del gradient  # autograd copies a gradient that is still referenced here
            results += [*edges, *[None] * (term.num_edges - len(edges))]
        return (None, None, token, *results)


def _first_edges(group: tuple[Term, ...]) -> list[int]:
    """For each term, the number of its first edge."""
    found, number = [], 0
    for term in group:
        found.append(number)
        number += term.num_edges
    return found


def _terms_of(carrier: Any) -> list[torch.Tensor]:
    if carrier is None:
        return []
    if not hasattr(carrier, "lowtide_terms"):
        return [carrier]
    found = list(carrier.lowtide_terms)
    del carrier.lowtide_terms
    return found


def with_shared_gates(function: Callable[..., Any], gates: SharedGates) -> Callable[..., Any]:
    """Call `function`, a compiled graph, with its inputs behind nodes that run its backward pass in parts."""

    def call(*args: Any) -> Any:
        chain, token, values = Chain(gates), None, list(args)
        # in reverse: autograd runs the last node first
        for group in reversed(gates.groups[1:]):
            edges = [
                (values if term.is_entrance else args)[term.place]
                for term in group
                for _ in range(term.num_edges)
            ]
            token, *passed = _SharedGate.apply(chain, group, token, *edges)  # type: ignore[no-untyped-call]
            for term in group:
                if term.is_last:
                    values[term.place] = passed.pop(0)
        del args
        return function(*values)

    return call


def shared_gates_of(
    backward: fx.GraphModule, places: Collection[int], *, num_terms: Mapping[int, int]
) -> SharedGates | None:
    """The gates of a backward graph whose gradients at `places` leave as soon as they are made, and all
    others at the end; None where no gradient can leave early."""
    grads = results_of(backward)
    if not any(grads[place] is not None for place in places):
        return None
    position = _positions(backward.graph)
    found: list[tuple[int, Term]] = []
    late: list[Term] = []
    for place, grad in enumerate(grads):
        if grad is None:
            continue
        if place not in places:
            late.append(Term(place, 0, is_last=True, num_edges=2))
            continue
        number = num_terms.get(place, 1)
        parts = _parts(grad, number)
        for index, part in enumerate(parts):
            is_last = index == number - 1
            made = 0 if part is None else _left_at(part, position)
            found.append((made, Term(place, index, is_last, max(2, number) if is_last else 1)))
    by_position: dict[int, list[Term]] = {}
    for made, term in sorted(found):
        by_position.setdefault(made, []).append(term)
    groups = [*by_position.values(), *([late] if late else [])]
    if not any(term.is_last for term in groups[0]):
        place = next(term.place for group in groups for term in group if term.is_last)
        groups[0].append(Term(place, ENTRANCE, is_last=True))
    return SharedGates(((), *map(tuple, groups)), len(grads))


def in_shared_parts(backward: fx.GraphModule, groups: Groups) -> fx.GraphModule:
    """A copy of a backward graph that hands over the gradients of each gate as soon as they are made. Its
    last input is the box for the gradients."""
    graph = fx.Graph()
    results = graph.graph_copy(backward.graph, {})
    assert isinstance(results, (list, tuple))
    position = {node: index for index, node in enumerate(graph.nodes)}
    inputs = graph.find_nodes(op="placeholder")
    with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before():
        box = graph.placeholder("box")
    position[box], last = len(inputs) - 1, box
    num_terms: dict[int, int] = {}
    terms_of = [[term for term in group if not term.is_entrance] for group in groups]
    for term in (term for group in terms_of for term in group):
        num_terms[term.place] = max(num_terms.get(term.place, 0), term.number + 1)
    parts = {place: _parts(results[place], number) for place, number in num_terms.items()}
    nodes = set(graph.nodes)
    for group in terms_of:
        gradients = [parts[term.place][term.number] for term in group]
        made = [node for node in gradients if node is not None]
        read = [user for node in made for user in node.users if user in nodes and user.target is not terms]
        latest = max([last, *made, *read], key=position.__getitem__)
        with graph.inserting_after(latest):
            last = graph.call_function(hand_over, (box, *gradients))
        position[last] = position[latest]
    for node in graph.find_nodes(op="call_function", target=terms):
        if not node.users:
            graph.erase_node(node)
    graph.output([])
    return aot_autograd.graph_module(backward, graph)


def _parts(grad: Any, number: int) -> list[fx.Node | None]:
    """The `number` terms of a gradient in a backward graph; None for terms that are zero."""
    if not isinstance(grad, fx.Node):
        return [None] * number
    parts = list(grad.args) if grad.target is terms and number > 1 else [grad]
    return [*parts, *[None] * (number - len(parts))]


def _positions(graph: fx.Graph) -> dict[fx.Node, int]:
    """The number of ops up to each node; parts of a tuple are made with the tuple."""
    found: dict[fx.Node, int] = {}
    number = 0
    for node in graph.nodes:
        number += node.target is not operator.getitem
        found[node] = number
    return found


def _left_at(grad: fx.Node, position: Mapping[fx.Node, int]) -> int:
    """The position of the last op that reads a gradient, or that makes it."""
    readers = (user for user in grad.users if user.op != "output" and user.target is not terms)
    return max([position[grad], *(position[reader] for reader in readers)])
