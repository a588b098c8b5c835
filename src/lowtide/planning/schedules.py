"""Schedules over a whole step: without runs that make nothing, and as what each captured graph runs."""

from collections.abc import Sequence
from dataclasses import replace

from lowtide.facts import Graph, Kind, Node, Region, Reserve, Step, Storage
from lowtide.planning.simulate import plain_order, simulate

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
    position = {
        rank: place
        for segment in range(len(step.graphs))
        for place, rank in enumerate(_scheduled_ranks(step, segment))
    }
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


def order_of_schedule(step: Step, schedule: Sequence[int]) -> tuple[int, ...]:
    """The order in which a step of one graph runs by `schedule`; the graph may be of another batch shape.

    ValueError when the graph has no such ops; `simulate` checks the rest.
    """
    ranks = _scheduled_ranks(step, 0)
    if not all(0 <= place < len(ranks) for place in schedule):
        raise ValueError("the schedule is for a graph with more ops")
    scheduled = [ranks[place] for place in schedule]
    known = set(ranks)
    others = [n for n in step.nodes if n.region is not Region.FORWARD and n.rank not in known]
    arrivals = [n.rank for n in others if n.op == "placeholder"]
    ends = [n.rank for n in others if n.op != "placeholder"]
    return (*range(step.first_backward_rank), *arrivals, *scheduled, *ends)


def _scheduled_ranks(step: Step, segment: int) -> list[int]:
    """Ranks of a graph's ops, forward and then backward: what positions in its schedule count."""
    return [
        node.rank
        for region in (Region.FORWARD, Region.BACKWARD)
        for node in step.nodes
        if node.segment == segment and node.region is region and node.op not in IN_NO_GRAPH
    ]


def reserve(step: Step) -> Reserve:
    """What the optimizer and a loss outside of the model need, in bytes."""
    return replace(
        _loss_reserve(step),
        optimizer_state_bytes=sum(s.nbytes for s in step.storages if s.kind is Kind.OPTIMIZER_STATE),
        optimizer_peak_bytes=_temporary_peak(step, [n for n in step.nodes if n.region is Region.OPTIMIZER]),
        batch_bytes=batch_bytes(step),
    )


def batch_bytes(step: Step) -> int:
    """What the model's own graphs read of the batch."""
    outside = _outside(step)
    read = {s for node in step.nodes if node.segment not in outside for s in node.makes}
    return sum(s.nbytes for s in step.storages if s.kind is Kind.INPUT and s.id in read)


def _outside(step: Step) -> set[int]:
    return {index for index, graph in enumerate(step.graphs) if not graph.in_model}


def _loss_reserve(step: Step) -> Reserve:
    """What a loss outside of the model makes, counted from its first op to where its gradients arrive.

    Nothing is recomputed there, so that it is the same in every plan.
    """
    outside = _outside(step)
    loss = [n for n in step.nodes if n.segment in outside and n.region is not Region.OPTIMIZER]
    made = {s for node in step.nodes for s in node.makes}
    unread = {s.id for s in step.storages if s.kind is Kind.INPUT and s.id not in made}
    inputs = unread | {s for node in loss for s in node.makes if _is_input(step.storages[s])}
    loss_input_bytes = sum(step.storages[s].nbytes for s in inputs)
    if not loss:
        return Reserve(loss_input_bytes=loss_input_bytes)
    arrivals = [
        n
        for n in step.nodes
        if n.segment not in outside and n.region is Region.BACKWARD and n.op == "placeholder"
    ]
    border = [*loss, *arrivals]
    own = {s for node in border for s in node.makes if not step.storages[s].static}
    storages = tuple(s if s.id in own else replace(s, nbytes=0) for s in step.storages)
    alone = simulate(replace(step, storages=storages), plain_order(step)).bytes_held
    kept = {s for s in own if step.storages[s].pinned} | {s for n in arrivals for s in n.holds if s in own}
    tangent_bytes = sum(graph.tangent_bytes for graph in step.graphs if graph.in_model)
    return Reserve(
        loss_bytes=max(int(alone[node.rank]) for node in border),
        loss_kept_bytes=max(0, sum(step.storages[s].nbytes for s in kept) - tangent_bytes),
        loss_input_bytes=loss_input_bytes,
    )


def _is_input(storage: Storage) -> bool:
    """Whether it is there before the step without being the model's own."""
    return storage.static and storage.kind in (Kind.INPUT, Kind.OTHER)


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
