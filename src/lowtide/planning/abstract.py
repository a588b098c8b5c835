"""Rematerialisation of an abstract graph: nodes with bytes and cost, nothing else.

Any node may run again anywhere after its first run, nothing is pinned, an output is freed after its
last read, and nodes may change places. `solve_graph` first looks for an order of first runs with
less excess, then walks down as `auto` does, and last anneals the whole sequence of runs. All limits
are counts and the random numbers are seeded, so that the result is always the same.

Shortcoming: annealing evaluates the whole sequence for every move; beyond a few thousand edges the
default number of moves takes longer than half a minute.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lowtide.errors import BudgetTooSmall, LowtideError
from lowtide.facts import Step
from lowtide.facts.serial import load_json
from lowtide.facts.units import size_and_bytes
from lowtide.planning.search.annealing import anneal, excess_and_cost
from lowtide.planning.search.descent import descend, refine, trim
from lowtide.planning.search.runs import Runs
from lowtide.planning.search.table import Op, Table

NUM_TARGETS = 12
WORK = 60_000_000
"""Reads that annealing may look at in all; about what fits into a third of a minute."""

MOVES_PER_NODE = 10_000
"""More are no use for a graph of a few nodes, which would else take as long as one of thousands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbstractGraph:
    """Nodes `0..n-1` in a topological order; `parents[i]` are read by node `i`."""

    name: str
    nbytes: tuple[int, ...]
    costs: tuple[float, ...]
    parents: tuple[tuple[int, ...], ...]

    @property
    def peak_bytes(self) -> int:
        """Peak of the plain order."""
        return excess_and_cost(self, range(len(self.nbytes)), 0).peak_bytes

    @property
    def floor_bytes(self) -> int:
        """No order holds less: the largest output plus inputs of any node."""
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
            if not 0 <= parent < child < len(nodes):
                raise LowtideError(f"{path}: edge {parent} -> {child} does not follow the order of ids")
            parents[child][parent] = None
        return AbstractGraph(
            name=str(data.get("name", Path(path).stem)),
            nbytes=tuple(int(node["bytes"]) for node in nodes),
            costs=tuple(node["cost"] for node in nodes),
            parents=tuple(tuple(mine) for mine in parents),
        )
    except KeyError as error:
        raise LowtideError(f"{path}: not a graph, {error} is missing") from error
    except (TypeError, ValueError) as error:
        raise LowtideError(f"{path}: not a graph, {error}") from error


def solve_graph(graph: AbstractGraph, *, budget_bytes: int, work: int = WORK) -> GraphSolution:
    """The cheapest order found whose peak is at most `budget_bytes`; BudgetTooSmall when none is."""
    if not graph.nbytes:
        raise LowtideError(f"graph '{graph.name}' has no nodes")
    num_reads = sum(map(len, graph.parents)) + len(graph.nbytes)
    num_moves = max(200, min(work // max(1, num_reads), MOVES_PER_NODE * len(graph.nbytes)))
    plain = tuple(range(len(graph.nbytes)))
    placed = anneal(graph, plain, budget_bytes, num_moves=num_moves // 3, recompute=False)
    found = [placed]
    if excess_and_cost(graph, placed, budget_bytes).excess_bytes:
        for start in dict.fromkeys((plain, placed)):
            order = _walk_down(graph, start, budget_bytes)
            found.append(anneal(graph, order, budget_bytes, num_moves=num_moves // 3, recompute=True))
    figures = [(excess_and_cost(graph, order, budget_bytes), order) for order in found]
    best, order = min(figures, key=lambda item: (item[0].excess_bytes, item[0].cost))
    if best.excess_bytes:
        lowest = min(figure.peak_bytes for figure, _ in figures)
        raise BudgetTooSmall(
            budget_bytes=budget_bytes,
            floor_bytes=lowest,
            node=str(best.peak_node),
            hint=f"No order holds less than {size_and_bytes(graph.floor_bytes)}.",
        )
    total = sum(graph.costs)
    return GraphSolution(
        order=order,
        budget_bytes=budget_bytes,
        peak_bytes=best.peak_bytes,
        extra_cost=best.cost - total,
        total_cost=total,
    )


def _walk_down(graph: AbstractGraph, start: Sequence[int], budget_bytes: int) -> tuple[int, ...]:
    """Recompute from the order `start` until the budget is met, or as far as it goes."""
    table = _table(graph, start)
    runs = Runs(table)
    peak = runs.peak_bytes()
    for part in range(1, NUM_TARGETS + 1):
        target = peak - (peak - budget_bytes) * part // NUM_TARGETS
        descend(runs, target, max_moves=4000)
        trim(runs, target)
    for _ in range(NUM_TARGETS):
        if not refine(runs, budget_bytes, tries=60):
            break
    return tuple(start[run.node] for run in runs.schedule())


def _table(graph: AbstractGraph, order: Sequence[int]) -> Table:
    """The graph as a step in which every node may run again before any later one."""
    size = len(order)
    place = {node: i for i, node in enumerate(order)}
    ops = tuple(
        Op(
            rank=i,
            reads=tuple(place[parent] for parent in graph.parents[node]),
            fresh=((i, graph.nbytes[node], False),),
            shared=(),
            workspace_bytes=0,
            seconds=graph.costs[node],
        )
        for i, node in enumerate(order)
    )
    return Table(
        step=Step(nodes=(), storages=()),
        size=size,
        width=size + 1,
        plain=ops,
        recipes=ops,
        again=tuple((i,) for i in range(size)),
        recompute=tuple(range(size)),
        place=tuple(range(size)),
        recipe_at=tuple(range(size)),
        segment=(0,) * size,
        slot_segment=(0,) * size,
        static_bytes=0,
        first_backward=size,
        uses={},
        own=((),) * size,
        first_need=(size,) * size,
        readers_first=(),
    )
