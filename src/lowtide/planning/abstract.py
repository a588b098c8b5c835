"""Rematerialization of an abstract graph: nodes with bytes and costs.

A node may run again anywhere after its first run. An output is freed after its last read. Nodes may change
places. `solve_graph` anneals the whole sequence of runs: first the order of the first runs, then also
recomputed runs, from several starts. All limits are counts and the random numbers are seeded, so the result
is always the same.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from lowtide.errors import BudgetTooSmall, LowtideError
from lowtide.facts.serial import check_types, load_json
from lowtide.planning.search.problem import Ints, OpRow, Problem, flatten
from lowtide.units import size_and_bytes

MOVES_PER_NODE = 6_000
"""Annealing moves for each node of a small graph."""

MANY_MOVES, FEW_PER_NODE = 300_000, 1_300
"""Annealing moves of a larger graph: a constant, and moves for each node. Hundreds of nodes take seconds."""

WARMTHS = (0.03, 0.3, 3.0)
"""The temperatures where annealing starts, as parts of the mean cost of a node."""

REORDER = 0.5
"""The share of moves that only reorder."""


@dataclass(frozen=True, kw_only=True)
class AbstractGraph:
    """Nodes `0..n-1` in a topological order; node `i` reads `parents[i]`."""

    name: str
    nbytes: tuple[int, ...]
    costs: tuple[float, ...]
    parents: tuple[tuple[int, ...], ...]

    @cached_property
    def problem(self) -> Problem:
        """The graph for the compiled search; op `n + i` recomputes node `i`."""
        nodes = range(len(self.nbytes))
        return flatten(
            [OpRow(reads=self.parents[i], makes=(i,), slot=0, may_move=True) for i in nodes],
            [
                OpRow(reads=self.parents[i], makes=(i,), slot=0, seconds=float(self.costs[i]), optional=True)
                for i in nodes
            ],
            views=[],
            nbytes=list(self.nbytes),
            pinned=[False] * len(self.nbytes),
            static_bytes=0,
        )

    @property
    def baseline_order(self) -> Ints:
        return np.arange(len(self.nbytes), dtype=np.int32)

    @property
    def peak_bytes(self) -> int:
        """The peak of the baseline."""
        return self.problem.evaluate(self.baseline_order, 0).peak_bytes if self.nbytes else 0

    @property
    def floor_bytes(self) -> int:
        """A lower bound: no order has a lower peak than the largest sum of a node's output and inputs."""
        return max(
            nbytes + sum(self.nbytes[p] for p in parents)
            for nbytes, parents in zip(self.nbytes, self.parents, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSolution:
    """An order of runs, its peak, and its cost beyond running every node once."""

    order: tuple[int, ...]
    budget_bytes: int
    peak_bytes: int
    extra_cost: float
    total_cost: float


def load_graph(path: str | Path) -> AbstractGraph:
    """Read `{"nodes": [{"id", "bytes", "cost"}], "edges": [[parent, child]]}`."""
    data = load_json(Path(path))
    try:
        nodes = sorted(data["nodes"], key=lambda node: node["id"])
        if [node["id"] for node in nodes] != list(range(len(nodes))):
            raise LowtideError(f"{path}: node ids must be 0, 1, 2, ... in a topological order")
        parents: list[dict[int, None]] = [{} for _ in nodes]
        for parent, child in data["edges"]:
            if not 0 <= int(parent) < int(child) < len(nodes):
                raise LowtideError(f"{path}: edge {parent} -> {child} does not follow the order of ids")
            parents[int(child)][int(parent)] = None
        graph = AbstractGraph(
            name=str(data.get("name", Path(path).stem)),
            nbytes=tuple(int(node["bytes"]) for node in nodes),
            costs=tuple(node["cost"] for node in nodes),
            parents=tuple(tuple(mine) for mine in parents),
        )
        check_types(graph)
        if min(graph.nbytes, default=0) < 0:
            raise LowtideError(f"{path}: a node of {min(graph.nbytes)} bytes")
        return graph
    except KeyError as error:
        raise LowtideError(f"{path}: not a graph, {error} is missing") from error
    except (ArithmeticError, TypeError, ValueError) as error:
        raise LowtideError(f"{path}: not a graph, {error}") from error


def solve_graph(graph: AbstractGraph, *, budget_bytes: int, moves: int | None = None) -> GraphSolution:
    """The cheapest order found with a peak of at most `budget_bytes`; BudgetTooSmall where none is found.

    Annealing takes `moves` moves in all; by default, a number that grows with the graph.
    """
    size = len(graph.nbytes)
    if not size:
        raise LowtideError(f"graph '{graph.name}' has no nodes")
    default_moves = min(MOVES_PER_NODE * size, MANY_MOVES + FEW_PER_NODE * size)
    order = _search(graph, budget_bytes, default_moves if moves is None else moves)
    figures = graph.problem.evaluate(order, budget_bytes)
    if figures.excess_bytes:
        live = graph.problem.live_bytes(order)
        raise BudgetTooSmall(
            budget_bytes=budget_bytes,
            floor_bytes=figures.peak_bytes,
            node=str(int(order[int(live.argmax())]) % size),
            hint=f"No order holds less than {size_and_bytes(graph.floor_bytes)}.",
            remedy="",
        )
    nodes = tuple(int(op) % size for op in order)
    return GraphSolution(
        order=nodes,
        budget_bytes=budget_bytes,
        peak_bytes=figures.peak_bytes,
        extra_cost=sum(graph.costs[int(op) - size] for op in order if op >= size),
        total_cost=sum(graph.costs),
    )


def _search(graph: AbstractGraph, budget_bytes: int, moves: int) -> Ints:
    """Reorder only, at no cost; then recompute as well, starting from that order and from the baseline."""
    baseline = graph.baseline_order
    reordered, found = _reordered(graph, budget_bytes, moves // 4)
    if not found:
        return reordered
    best: tuple[tuple[int, float], Ints] | None = None
    for start in (reordered, baseline):
        for seed, warmth in enumerate(WARMTHS, start=1):
            figures, order = graph.problem.anneal(
                start, budget_bytes=budget_bytes, moves=moves // 8, warmth=warmth, seed=seed, reorder=REORDER
            )
            if best is None or (figures.excess_bytes, figures.seconds) < best[0]:
                best = (figures.excess_bytes, figures.seconds), order
    assert best is not None
    figures, order = graph.problem.anneal(
        best[1], budget_bytes=budget_bytes, moves=moves // 4, warmth=WARMTHS[0], reorder=REORDER
    )
    return order if (figures.excess_bytes, figures.seconds) <= best[0] else best[1]


def _reordered(graph: AbstractGraph, budget_bytes: int, moves: int) -> tuple[Ints, int]:
    """The order of first runs with the least bytes above the budget, and these bytes."""
    figures, order = graph.problem.anneal(
        graph.baseline_order, budget_bytes=budget_bytes, moves=moves, warmth=WARMTHS[1], reorder=1.0
    )
    return order, figures.excess_bytes
