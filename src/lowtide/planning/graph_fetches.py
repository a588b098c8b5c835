"""The fetches of resting weights in the schedules of graphs (`facts.Graph.fetches`), from runs of a step and
back. `by_graph` has the ranks of each graph's ops, as positions count them."""

from collections.abc import Iterable, Iterator, Sequence

from lowtide.facts import FETCH, Graph, Run, Step

Releases = Sequence[tuple[int, int]]
"""The releases of one graph (`facts.Graph`)."""

Fetches = Sequence[tuple[int, int, int]]
"""Its fetches."""

Ranks = Sequence[Sequence[int]]


def transfers_of(graphs: Iterable[Graph]) -> tuple[list[Releases], list[Fetches]]:
    """The releases and the fetches of these graphs."""
    some = list(graphs)
    return [graph.releases for graph in some], [graph.fetches for graph in some]


def fetch_ranks(step: Step, by_graph: Ranks) -> list[list[int]]:
    """For each graph, the nodes that fetch its resting weights in the forward pass."""
    found: list[list[int]] = [[] for _ in by_graph]
    for node in step.nodes[: step.first_backward_rank]:
        if node.op == FETCH:
            found[node.segment].append(node.rank)
    return found


def fetches_of(
    step: Step, runs: Sequence[Run], by_graph: Ranks
) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """The fetches of each graph by the schedule `runs` of the step."""
    fetching = fetch_ranks(step, by_graph)
    is_op = {rank for ops in by_graph for rank in ops} if any(fetching) else set[int]()
    before: dict[int, int] = {}
    following = -1
    for run in reversed(runs) if is_op else ():
        if run.is_first and step.nodes[run.rank].op == FETCH:
            before[run.rank] = following
        elif run.is_first and run.rank in is_op:
            following = run.rank
    for segment, (ranks, ops) in enumerate(zip(fetching, by_graph, strict=True)):
        position = {rank: place for place, rank in enumerate(ops)} if ranks else {}
        inputs = _inputs_of(step, segment) if ranks else {}
        firsts = [next(op for op in ops if op > rank) for rank in ranks]
        yield tuple(
            (inputs[step.nodes[rank].reads[0]], position[first], position[before[rank]])
            for rank, first in zip(ranks, firsts, strict=True)
        )


def _inputs_of(step: Step, segment: int) -> dict[int, int]:
    """By rank, the inputs of a graph, numbered. Other placeholders make what is live when the step begins."""
    nodes = (n for n in step.nodes[: step.first_backward_rank] if n.segment == segment)
    inputs = [n for n in nodes if n.op == "placeholder" and all(step.storages[s].static for s in n.makes)]
    return {node.rank: place for place, node in enumerate(inputs)}


def with_early_fetches(
    step: Step, runs: Iterable[Run], fetches: Sequence[Fetches], by_graph: Ranks
) -> list[Run]:
    """The same runs of the forward pass, with each fetch before the op that `fetches` name."""
    early: dict[int, list[Run]] = {}
    for some, ranks, ops in zip(fetches, fetch_ranks(step, by_graph), by_graph, strict=False):
        for rank, (_, _, before) in zip(ranks, some, strict=False):
            if not 0 <= before < len(ops):
                raise ValueError("the fetches are for a graph with other ops")
            early.setdefault(min(ops[before], rank), []).append(Run(rank))
    moved = {run for some in early.values() for run in some}
    found: list[Run] = []
    for run in runs:
        if run.is_first:
            found += early.pop(run.rank, ())
        if run not in moved:
            found.append(run)
    return found
