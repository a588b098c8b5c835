"""Abstract graphs: every order is valid, fits, and says what it costs."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import BudgetTooSmall, LowtideError
from lowtide.planning.abstract import AbstractGraph, load_graph, solve_graph


def referee(graph, order):
    """Peak and cost of an order, block by block."""
    reads = {}
    latest = {}
    for position, node in enumerate(order):
        reads[position] = [latest[parent] for parent in graph.parents[node]]
        latest[node] = position
    assert set(order) == set(range(len(graph.nbytes)))
    until = {p: max([p] + [q for q in reads if p in reads[q]]) for p in reads}
    held = [sum(graph.nbytes[order[q]] for q in reads if q <= p <= until[q]) for p in reads]
    return max(held), sum(graph.costs[node] for node in order)


@st.composite
def graphs(draw):
    size = draw(st.integers(2, 16))
    return AbstractGraph(
        name="random",
        nbytes=tuple(draw(st.lists(st.integers(1, 50), min_size=size, max_size=size))),
        costs=tuple(draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))),
        parents=tuple(
            tuple(sorted(draw(st.sets(st.integers(0, node - 1), max_size=3)) if node else ()))
            for node in range(size)
        ),
    )


@settings(max_examples=40, deadline=None)
@given(graphs(), st.floats(0.0, 1.0))
def test_an_order_fits_and_its_figures_are_true(graph, share):
    assert referee(graph, range(len(graph.nbytes))) == (graph.peak_bytes, sum(graph.costs))
    budget = graph.floor_bytes + int((graph.peak_bytes - graph.floor_bytes) * share)
    try:
        solution = solve_graph(graph, budget_bytes=budget, moves=1000)
    except BudgetTooSmall as error:
        assert error.floor_bytes > budget
        return
    peak, cost = referee(graph, solution.order)
    assert peak == solution.peak_bytes <= budget
    assert cost == solution.total_cost + solution.extra_cost
    assert solution == solve_graph(graph, budget_bytes=budget, moves=1000)


def train_chain(length):
    """A forward chain, then a backward chain whose nodes each read one forward node."""
    parents = [()] + [(i - 1,) for i in range(1, length)]
    parents += [(length + i - 1, length - 1 - i) if i else (length - 1,) for i in range(length)]
    count = 2 * length
    return AbstractGraph(name="chain", nbytes=(10,) * count, costs=(1,) * count, parents=tuple(parents))


def test_a_chain_is_recomputed_to_a_third_of_its_peak():
    graph = train_chain(18)
    solution = solve_graph(graph, budget_bytes=graph.peak_bytes // 3, moves=1500)
    assert referee(graph, solution.order)[0] <= graph.peak_bytes // 3
    assert 0 < solution.extra_cost <= 20


def test_reordering_alone_is_free():
    # Two wide values, each read by one narrow node: plain order makes both wide ones first.
    graph = AbstractGraph(
        name="two", nbytes=(50, 50, 1, 1, 1), costs=(5,) * 5, parents=((), (), (0,), (1,), (2, 3))
    )
    solution = solve_graph(graph, budget_bytes=60, moves=1000)
    assert (solution.extra_cost, solution.peak_bytes <= 60) == (0, True)


def test_a_budget_below_the_largest_node_is_refused():
    with pytest.raises(BudgetTooSmall, match="No order holds less than 30 bytes"):
        solve_graph(train_chain(6), budget_bytes=29, moves=1000)


def test_graphs_are_read_and_checked(tmp_path):
    path = tmp_path / "g.json"
    nodes = [{"id": i, "bytes": 10 + i, "cost": i} for i in range(3)]
    path.write_text(json.dumps({"nodes": nodes[::-1], "edges": [[0, 1], [1, 2], [0, 2]]}))
    graph = load_graph(path)
    assert (graph.name, graph.nbytes, graph.costs) == ("g", (10, 11, 12), (0, 1, 2))
    assert graph.parents == ((), (0,), (1, 0))
    assert (graph.peak_bytes, graph.floor_bytes) == (33, 33)
    for bad, says in [
        ({"nodes": nodes, "edges": [[2, 1]]}, "edge 2 -> 1 does not follow"),
        ({"nodes": nodes[1:], "edges": []}, "ids must be 0, 1, 2"),
        ({"nodes": nodes}, "'edges' is missing"),
    ]:
        path.write_text(json.dumps(bad))
        with pytest.raises(LowtideError, match=says):
            load_graph(path)
