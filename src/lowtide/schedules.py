"""Schedules over a whole step: without runs that make nothing, and as what each captured graph runs."""

from collections.abc import Sequence
from dataclasses import replace

from lowtide.facts import Graph, Kind, Node, Region, Reserve, Step

RANDOM_STATE = "random_state"
"""The op that keeps a generator's state for a replay; it runs only where a plan reads it."""

IN_NO_GRAPH = ("placeholder", "output", RANDOM_STATE)
"""Ops that stand for the ends of a graph or for what a plan adds; a graph's schedule does not count them."""


def as_eager(step: Step) -> Step:
    """The same step with the sizes that eager PyTorch's own ops have: what a user runs today."""
    storages = tuple(replace(s, nbytes=s.nbytes + s.extra_eager_bytes) for s in step.storages)
    return replace(step, storages=storages)


def without_needless_runs(step: Step, order: Sequence[int]) -> tuple[int, ...]:
    """Leave out every run that makes nothing from what stands since the forward pass.

    A view, or a part of a tuple, is then the same value as its first run.
    """
    seen: set[int] = set()
    again: set[int] = set()
    kept = []
    for rank in order:
        if rank in seen:
            recipe = step.nodes[rank].recipe
            if recipe is not None and not recipe.makes and again.isdisjoint(recipe.reads):
                continue
            again.add(rank)
        seen.add(rank)
        kept.append(rank)
    return tuple(kept)


def graph_schedules(step: Step, order: Sequence[int]) -> tuple[Graph, ...]:
    """The step's graphs with the schedule that `order` gives each of them; none for an abstract step."""
    if not step.graphs:
        return ()
    position: dict[int, int] = {}
    counts = [0] * len(step.graphs)
    for region in (Region.FORWARD, Region.BACKWARD):
        for node in step.nodes:
            if node.region is region and node.op not in IN_NO_GRAPH:
                position[node.rank] = counts[node.segment]
                counts[node.segment] += 1
    schedules: list[list[int]] = [[] for _ in step.graphs]
    seen: set[int] = set()
    for rank in order:
        node = step.nodes[rank]
        if rank in position and (node.region is Region.BACKWARD or rank in seen):
            schedules[node.segment].append(position[rank])
        seen.add(rank)
    return tuple(
        replace(graph, schedule=tuple(schedule))
        for graph, schedule in zip(step.graphs, schedules, strict=True)
    )


def reserve(step: Step) -> Reserve:
    """What the optimizer and a loss outside of the model need, in bytes."""
    state = sum(s.nbytes for s in step.storages if s.kind is Kind.OPTIMIZER_STATE)
    outside = {i for i, graph in enumerate(step.graphs) if not graph.in_model}
    loss_nodes = [n for n in step.nodes if n.segment in outside and n.region is not Region.OPTIMIZER]
    loss = sum(step.storages[s].nbytes for n in loss_nodes for s in n.makes if not step.storages[s].static)
    return Reserve(
        optimizer_state_bytes=state,
        optimizer_peak_bytes=_temporary_peak(step, [n for n in step.nodes if n.region is Region.OPTIMIZER]),
        loss_bytes=loss + max((n.workspace_bytes for n in loss_nodes), default=0),
    )


def _temporary_peak(step: Step, nodes: Sequence[Node]) -> int:
    """The most that these nodes hold of what they make themselves."""
    last = {node.rank: node.rank for node in nodes}
    for node in nodes:
        for read in node.reads:
            last[read] = max(last.get(read, 0), node.rank)
    sizes = {node.rank: sum(step.storages[s].nbytes for s in node.makes) for node in nodes}
    ends: dict[int, int] = {}
    live = peak = 0
    for node in nodes:
        live += sizes[node.rank]
        peak = max(peak, live + node.workspace_bytes)
        ends[last[node.rank]] = ends.get(last[node.rank], 0) + sizes[node.rank]
        live -= ends.pop(node.rank, 0)
    return peak
