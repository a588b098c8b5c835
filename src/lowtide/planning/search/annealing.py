"""Simulated annealing of a sequence of runs: move one, put one in, take one out."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from random import Random
from typing import Protocol


class Weighted(Protocol):
    """What annealing needs of a graph."""

    @property
    def nbytes(self) -> tuple[int, ...]: ...
    @property
    def costs(self) -> tuple[float, ...]: ...
    @property
    def parents(self) -> tuple[tuple[int, ...], ...]: ...


@dataclass(frozen=True, slots=True)
class Figures:
    """`excess_bytes` is what is held above the budget, summed over the runs."""

    peak_bytes: int
    peak_node: int
    excess_bytes: int
    cost: float
    needless: tuple[int, ...]
    """positions of runs that come again and that nobody reads"""


def excess_and_cost(graph: Weighted, order: Sequence[int], budget_bytes: int) -> Figures:
    """Walk `order`, in which every run reads the latest earlier run of its parents."""
    nbytes, parents, costs = graph.nbytes, graph.parents, graph.costs
    latest = [-1] * len(nbytes)
    last_read = list(range(len(order)))
    again: list[int] = []
    cost = 0.0
    for position, node in enumerate(order):
        for parent in parents[node]:
            last_read[latest[parent]] = position
        if latest[node] >= 0:
            again.append(position)
        latest[node] = position
        cost += costs[node]
    freed = [0] * (len(order) + 1)
    for position, until in enumerate(last_read):
        freed[until] += nbytes[order[position]]
    held = peak = excess = 0
    peak_node = -1
    for position, node in enumerate(order):
        held += nbytes[node]
        if held > peak:
            peak, peak_node = held, node
        if held > budget_bytes:
            excess += held - budget_bytes
        held -= freed[position]
    needless = tuple(p for p in again if last_read[p] == p)
    return Figures(peak, peak_node, excess, cost, needless)


def anneal(
    graph: Weighted, start: Sequence[int], budget_bytes: int, *, num_moves: int, recompute: bool
) -> tuple[int, ...]:
    """The best order met, first by excess, then by cost. Without `recompute`, runs only change places."""
    random = Random(0)
    children = _children(graph)
    order = list(start)
    here = excess_and_cost(graph, order, budget_bytes)
    if not here.excess_bytes and not recompute:
        return tuple(order)
    best, best_order = here, tuple(order)
    # One byte too many in one run weighs as much as this share of all costs per byte of budget.
    weight = 4 * sum(graph.costs) / max(1, budget_bytes)
    heat = max(graph.costs, default=0.0) if recompute else 30 * weight * max(graph.nbytes, default=0)
    for move in range(num_moves):
        temperature = heat * 10 ** (-1 - 3 * move / num_moves) + 1e-12
        changed = _change(graph, children, order, random, recompute=recompute)
        if changed is None:
            continue
        there = excess_and_cost(graph, changed, budget_bytes)
        if there.needless:
            gone = set(there.needless)
            changed = [node for position, node in enumerate(changed) if position not in gone]
            there = excess_and_cost(graph, changed, budget_bytes)
        worse = there.cost - here.cost + weight * (there.excess_bytes - here.excess_bytes)
        if worse <= 0 or random.random() < exp(-worse / temperature):
            order, here = changed, there
            if (here.excess_bytes, here.cost) < (best.excess_bytes, best.cost):
                best, best_order = here, tuple(order)
                if not best.excess_bytes and not recompute:
                    break
    return best_order


def _children(graph: Weighted) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in graph.nbytes]
    for child, parents in enumerate(graph.parents):
        for parent in parents:
            children[parent].append(child)
    return children


def _change(
    graph: Weighted, children: list[list[int]], order: list[int], random: Random, *, recompute: bool
) -> list[int] | None:
    """A neighbour of `order`, or None when the chosen move does not exist here."""
    kind = random.random() if recompute else 1.0
    if kind < 0.35:
        return _put_in(children, order, random)
    position = random.randrange(len(order))
    if kind < 0.6:
        node = order[position]
        return order[:position] + order[position + 1 :] if node in order[:position] else None
    distance = 1 + int(len(order) * random.random() ** 3)
    if random.random() < 0.5:
        return _later(graph, order, position, min(len(order), position + distance + 1))
    return _earlier(graph, order, position, max(0, position - distance))


def _later(graph: Weighted, order: list[int], position: int, end: int) -> list[int] | None:
    """Move a run to just before `end`, and with it what reads it on the way."""
    moved = {order[position]}
    stay: list[int] = []
    go: list[int] = []
    for node in order[position:end]:
        if node in moved or not moved.isdisjoint(graph.parents[node]):
            moved.add(node)
            go.append(node)
        else:
            stay.append(node)
    return [*order[:position], *stay, *go, *order[end:]] if stay else None


def _earlier(graph: Weighted, order: list[int], position: int, begin: int) -> list[int] | None:
    """Move a run to `begin`, and before it what it reads on the way."""
    needed = {order[position], *graph.parents[order[position]]}
    stay: list[int] = []
    go: list[int] = [order[position]]
    for node in reversed(order[begin:position]):
        if node in needed:
            needed.update(graph.parents[node])
            go.append(node)
        else:
            stay.append(node)
    return [*order[:begin], *reversed(go), *reversed(stay), *order[position + 1 :]] if stay else None


def _put_in(children: list[list[int]], order: list[int], random: Random) -> list[int] | None:
    """Run a node again right before one of its readers."""
    reader_at = random.randrange(len(order))
    before = [p for p in range(reader_at) if order[reader_at] in children[order[p]]]
    if not before:
        return None
    node = order[random.choice(before)]
    return [*order[:reader_at], node, *order[reader_at:]]
