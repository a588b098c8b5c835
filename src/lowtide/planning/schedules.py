"""The schedule of a step as one schedule for each graph, eager's own, and the bytes besides the graphs."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lowtide.facts import (
    FETCH,
    FRAMES,
    LAST_OUTPUTS,
    UPDATE,
    Graph,
    GraphRun,
    Kind,
    Node,
    Region,
    Reserve,
    Run,
    Step,
    Storage,
)
from lowtide.planning.eager_checkpoints import with_own_checkpoints
from lowtide.planning.graph_fetches import (
    Fetches,
    Releases,
    fetch_ranks,
    fetches_of,
    with_early_fetches,
)
from lowtide.planning.resting_forms import state_rests
from lowtide.planning.resting_weights import with_weights_in_memory
from lowtide.planning.simulate import (
    Timeline,
    baseline_runs,
    eager_runs,
    is_remat,
    simulate,
    simulate_unchecked,
    source_of,
)
from lowtide.planning.transfer_model import last_forward_reads, released_after, value_of, with_releases

ENDS = ("placeholder", "output", UPDATE, FETCH)
"""Nodes that are no captured ops: inputs, outputs, updates, fetches. Positions do not count them."""


def as_eager(step: Step) -> Step:
    """The same step with the bytes of eager PyTorch's own ops: what a user runs without lowtide."""
    storages = tuple(
        replace(s, nbytes=s.nbytes + s.extra_eager_bytes, pinned=s.pinned or s.pinned_in_eager)
        for s in with_weights_in_memory(step.storages)
    )
    nodes = tuple(
        replace(
            node,
            # negative where eager writes over an input as well
            workspace_bytes=max(min(0, node.workspace_bytes), node.workspace_bytes + node.extra_eager_bytes),
            reads=() if node.op == FRAMES else tuple(dict.fromkeys((*node.reads, *node.eager_reads))),
        )
        if node.extra_eager_bytes or node.eager_reads or node.op == FRAMES
        else node
        for node in step.nodes
    )
    return replace(step, storages=storages, nodes=nodes)


def eager_timeline(step: Step) -> Timeline:
    """A step as eager PyTorch runs it, with the user's own calls of torch.utils.checkpoint."""
    return simulate_unchecked(as_eager(step), with_own_checkpoints(step, eager_runs(step)))


def without_needless_runs(step: Step, runs: Sequence[Run]) -> tuple[Run, ...]:
    """Leave out remat runs of views and parts of tuples whose reads are first values.

    The value of such a run is the value of the first run.
    """
    rematerialized: set[int] = set()
    kept = []
    for run in runs:
        if is_remat(step, run):
            remat = source_of(step, run)
            if not remat.makes and rematerialized.isdisjoint(remat.reads):
                continue
            rematerialized.add(run.rank)
        kept.append(run)
    return tuple(kept)


def graph_schedules(step: Step, runs: Sequence[Run]) -> tuple[Graph, ...]:
    """The step's graphs with the schedule that `runs` give each of them; none for an abstract step."""
    if not step.graphs:
        return ()
    by_graph = scheduled_ranks(step)
    position = {rank: place for ranks in by_graph for place, rank in enumerate(ranks)}
    fetching = fetch_ranks(step, by_graph)
    position.update((rank, -1 - place) for ranks in fetching for place, rank in enumerate(ranks))
    schedules: list[list[GraphRun]] = [[] for _ in step.graphs]
    for run in runs:
        node = step.nodes[run.rank]
        if run.rank in position and (node.region is Region.BACKWARD or not run.is_first):
            schedules[node.segment].append(GraphRun(position[run.rank], run.rule))
    releases: list[list[tuple[int, int]]] = [[] for _ in step.graphs]
    for leave, after in sorted(released_after(step, runs).items()):
        place = (position[value_of(step, leave)], position[after])
        releases[step.nodes[leave].segment].append(place)
    return tuple(
        replace(
            graph,
            schedule=tuple(schedule),
            releases=tuple(released),
            later_bytes=later_bytes,
            fetches=fetches,
        )
        for graph, schedule, released, later_bytes, fetches in zip(
            step.graphs,
            schedules,
            releases,
            _later_bytes(step, runs),
            fetches_of(step, runs, by_graph),
            strict=True,
        )
    )


def runs_of_schedules(
    step: Step,
    schedules: Sequence[Sequence[GraphRun]],
    releases: Sequence[Releases] = (),
    fetches: Sequence[Fetches] = (),
) -> tuple[Run, ...]:
    """The runs of a step by one schedule for each of its graphs; the schedules may be of another batch shape.

    Offloaded values that `releases` do not mention are freed after their last forward read, and resting
    weights that `fetches` do not mention are fetched right before their first.
    ValueError when a graph has no such ops; `simulate` checks the rest.
    """
    scheduled: list[list[Run]] = []
    by_graph = scheduled_ranks(step)
    for schedule, ranks, fetching in zip(schedules, by_graph, fetch_ranks(step, by_graph), strict=False):
        if not all(-len(fetching) <= run.position < len(ranks) for run in schedule):
            raise ValueError("the schedule is for a graph with more ops")
        scheduled.append(
            [
                Run(ranks[run.position] if run.position >= 0 else fetching[-1 - run.position], run.rule)
                for run in schedule
            ]
        )
    wanted = demanded(step, itertools.chain.from_iterable(scheduled))
    forward = [n for n in step.nodes[: step.first_backward_rank] if not n.on_demand or n.rank in wanted]
    released = with_releases(step, _first_runs(forward), _places(step, releases, by_graph))
    runs = with_early_fetches(step, released, fetches, by_graph)
    rest = step.nodes[step.first_backward_rank :]
    for (region, segment), group in itertools.groupby(rest, key=lambda n: (n.region, n.segment)):
        nodes = list(group)
        if region is Region.BACKWARD and segment >= 0 and scheduled[segment]:
            runs += _first_runs(node for node in nodes if node.op == "placeholder")
            ends = [node for node in nodes if node.op in ENDS and node.op != "placeholder"]
            runs += _with_ends(step, scheduled[segment], _first_runs(ends))
        else:
            runs += _first_runs(nodes)
    return tuple(runs)


def _places(step: Step, releases: Sequence[Releases], by_graph: Sequence[Sequence[int]]) -> dict[int, int]:
    """By movable node, the rank after which it runs."""
    places = last_forward_reads(step)
    leave_of = {value_of(step, leave): leave for leave in places}
    for some, ranks in zip(releases, by_graph, strict=False):
        for op, after in some:
            if not (op < len(ranks) and after < len(ranks) and ranks[op] in leave_of):
                raise ValueError("the releases are for a graph with other ops")
            places[leave_of[ranks[op]]] = ranks[after]
    return places


def _later_bytes(step: Step, runs: Sequence[Run]) -> list[int]:
    """For each graph of the model, the peak of what is made between its forward and its backward pass: by the
    graphs after it, and by code outside of graphs. The loss does not count."""
    own = [index for index, graph in enumerate(step.graphs) if graph.in_model]
    found = [0] * len(step.graphs)
    if len(own) < 2:
        return found
    timeline = simulate(step, runs)
    windows = {index: window for index in own if (window := _between_passes(step, runs, index))}
    if not windows:
        return found
    loss_from = max(begin for begin, _ in windows.values())
    loss_to = min(end for _, end in windows.values())
    workspace = np.array(timeline.workspace_bytes, dtype=np.int64)
    workspace[loss_from:loss_to] = 0
    nbytes = [step.storages[storage].nbytes for storage, _, _ in timeline.blocks]
    starts, ends = np.array([block[1:] for block in timeline.blocks], dtype=np.int64).reshape(-1, 2).T
    is_loss = (loss_from <= starts) & (starts < loss_to)
    sizes = np.where(is_loss, 0, np.array(nbytes, dtype=np.int64))
    for index, (begin, end) in windows.items():
        is_later = (begin <= starts) & (starts < end)
        change = np.zeros(len(runs) + 1, dtype=np.int64)
        np.add.at(change, starts[is_later], sizes[is_later])
        np.subtract.at(change, ends[is_later] + 1, sizes[is_later])
        live = change.cumsum()[:-1] + workspace
        found[index] = int(live[begin:end].max(initial=0))
    return found


def _between_passes(step: Step, runs: Sequence[Run], graph: int) -> tuple[int, int] | None:
    """The place after the last run of a graph's forward pass, and that of the first run of its backward pass;
    None without a backward pass."""
    places: dict[Region, list[int]] = {}
    for place, run in enumerate(runs):
        node = step.nodes[run.rank]
        if node.segment == graph and run.is_first:
            places.setdefault(node.region, []).append(place)
    if Region.BACKWARD not in places:
        return None
    return max(places.get(Region.FORWARD, [-1])) + 1, min(places[Region.BACKWARD])


def demanded(step: Step, runs: Iterable[Run]) -> set[int]:
    """Nodes on demand that these runs read."""
    return {
        read
        for run in runs
        if not run.is_first
        for read in source_of(step, run).reads
        if step.nodes[read].on_demand
    }


def _first_runs(nodes: Iterable[Node]) -> list[Run]:
    return [Run(node.rank) for node in nodes]


def _with_ends(step: Step, runs: Iterable[Run], ends: list[Run]) -> list[Run]:
    """A schedule with the nodes that positions do not count, each before the first op of a later rank."""
    found: list[Run] = []
    for run in runs:
        while ends and not is_remat(step, run) and ends[0].rank < run.rank:
            found.append(ends.pop(0))
        found.append(run)
    return found + ends


def scheduled_ranks(step: Step) -> list[list[int]]:
    """For each graph, the ranks of its ops as captured, forward and then backward: its schedule has positions
    in this list."""
    found: dict[tuple[int, Region], list[int]] = {}
    for node in sorted(step.nodes, key=lambda node: node.eager_place):
        if node.op not in ENDS and not node.on_demand:
            found.setdefault((node.segment, node.region), []).append(node.rank)
    return [
        found.get((graph, Region.FORWARD), []) + found.get((graph, Region.BACKWARD), [])
        for graph in range(max([len(step.graphs), *(node.segment + 1 for node in step.nodes)]))
    ]


def reserve(step: Step) -> Reserve:
    """The bytes of the optimizer and of a loss outside of the model."""
    return replace(
        _loss_reserve(step),
        optimizer_state_bytes=sum(s.nbytes for s in step.storages if s.kind is Kind.OPTIMIZER_STATE),
        optimizer_peak_bytes=_temporary_peak(step, [n for n in step.nodes if n.region is Region.OPTIMIZER]),
        batch_bytes=batch_bytes(step),
        earlier_gradient_bytes=_earlier_gradient_bytes(step),
        last_output_bytes=sum(s.nbytes for s in step.storages if s.name == LAST_OUTPUTS),
        bucket_bytes=bucket_bytes(step),
        gradients_in_buckets=bucket_bytes(step) > 0 and not any(map(_is_own_gradient, step.storages)),
    )


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """The optimizer's step in chunks of `chunk_bytes`, or whole for 0: the peak of the step, and the bytes
    that the optimizer allocates itself, where known."""

    chunk_bytes: int
    peak_bytes: int
    inside_bytes: int

    def reserved(self, reserve: Reserve) -> Reserve:
        return replace(reserve, optimizer_peak_bytes=max(reserve.optimizer_peak_bytes, self.inside_bytes))


def optimizer_step(step: Step, timeline: Timeline, budget_bytes: int) -> OptimizerStep:
    """The optimizer's step whole, else in the largest chunks within the budget, else in the smallest. State
    that rests is read chunk by chunk."""
    ways = [chunk_bytes for chunk_bytes, _ in reversed(step.optimizer_chunks)]
    if not state_rests(step):
        ways.insert(0, 0)
    found = [split_optimizer_step(step, timeline, chunk_bytes) for chunk_bytes in ways]
    return next((way for way in found if way.peak_bytes <= budget_bytes), found[-1])


def split_optimizer_step(step: Step, timeline: Timeline, chunk_bytes: int) -> OptimizerStep:
    """The optimizer's step in chunks of `chunk_bytes`, a size that the step knows, or whole for 0."""
    most = dict(step.optimizer_chunks).get(chunk_bytes)
    rests = state_rests(step)
    peak_bytes = inside_bytes = 0
    for run, live_bytes in zip(timeline.runs, timeline.live_bytes, strict=True):
        node = step.nodes[run.rank]
        if node.region is Region.OPTIMIZER:
            whole = node.workspace_bytes + node.extra_eager_bytes
            inside = whole if most is None else most if rests else min(whole, most)
            peak_bytes = max(peak_bytes, int(live_bytes) - node.workspace_bytes + inside)
            inside_bytes = max(inside_bytes, inside)
    return OptimizerStep(chunk_bytes, peak_bytes, inside_bytes if step.optimizer_chunks else 0)


def bucket_bytes(step: Step) -> int:
    """The bytes of the buckets in which gradients go to other processes."""
    return sum(s.nbytes for s in step.storages if s.kind is Kind.GRADIENT and s.static)


def with_buckets(step: Step, *, bucket_bytes: int, gradients_in_buckets: bool) -> Step:
    """The same step with buckets for gradients beside it.

    Where the buckets take all gradients, each gradient is freed once it is in a bucket. In a step of several
    graphs, the gradients stay live: another graph may add to them.
    """
    if not bucket_bytes:
        return step
    bucket = Storage(
        id=len(step.storages),
        nbytes=bucket_bytes,
        kind=Kind.GRADIENT,
        name="buckets of gradients",
        static=True,
    )
    storages = (*step.storages, bucket)
    if not gradients_in_buckets or sum(graph.in_model for graph in step.graphs) > 1:
        return replace(step, storages=storages)
    handed = {s.id for s in step.storages if _is_own_gradient(s)}
    storages = tuple(replace(s, pinned=False) if s.id in handed else s for s in storages)
    nodes = tuple(
        replace(node, reads=tuple(r for r in node.reads if handed.isdisjoint(step.nodes[r].holds)))
        if (node.op, node.region) == ("output", Region.BACKWARD)
        else node
        for node in step.nodes
    )
    return replace(step, storages=storages, nodes=nodes)


def _is_own_gradient(storage: Storage) -> bool:
    """Whether it becomes a parameter's `.grad`."""
    return storage.kind is Kind.GRADIENT and storage.pinned


def batch_bytes(step: Step) -> int:
    """The bytes of the batch that the model's own graphs read, on the device or on the host."""
    in_loss = _loss_graphs(step)
    read = {s for node in step.nodes if node.segment not in in_loss for s in node.makes}
    return sum(s.nbytes + s.host_bytes for s in step.storages if s.kind is Kind.INPUT and s.id in read)


def _earlier_gradient_bytes(step: Step) -> int:
    """The bytes of gradients that are live before the backward pass makes any."""
    forward = [s for node in step.nodes[: step.first_backward_rank] for s in node.makes]
    return sum(step.storages[s].nbytes for s in forward if step.storages[s].kind is Kind.GRADIENT)


def _loss_graphs(step: Step) -> set[int]:
    return {index for index, graph in enumerate(step.graphs) if not graph.in_model}


def _loss_reserve(step: Step) -> Reserve:
    """The bytes of a loss outside of the model, from its first op to the tangents of the model.

    The loss recomputes nothing, so these bytes are the same in every plan.
    """
    in_loss = _loss_graphs(step)
    loss = [n for n in step.nodes if n.segment in in_loss and n.region is not Region.OPTIMIZER]
    made = {s for node in step.nodes for s in node.makes}
    unread = {s.id for s in step.storages if s.kind is Kind.INPUT and s.id not in made}
    inputs = unread | {s for node in loss for s in node.makes if _is_input(step.storages[s])}
    loss_input_bytes = sum(step.storages[s].nbytes for s in inputs)
    if not loss:
        return Reserve(loss_input_bytes=loss_input_bytes)
    arrivals = [
        n
        for n in step.nodes
        if n.segment not in in_loss and n.region is Region.BACKWARD and n.op == "placeholder"
    ]
    border = [*loss, *arrivals]
    own = {s for node in border for s in node.makes if not step.storages[s].static}
    storages = tuple(s if s.id in own else replace(s, nbytes=0) for s in step.storages)
    timeline = simulate(replace(step, storages=storages), baseline_runs(step))
    alone = {run.rank: int(live) for run, live in zip(timeline.runs, timeline.live_bytes, strict=True)}
    kept = {s for s in own if step.storages[s].pinned} | {s for n in arrivals for s in n.holds if s in own}
    tangent_bytes = sum(graph.tangent_bytes for graph in step.graphs if graph.in_model)
    return Reserve(
        loss_bytes=max(alone[node.rank] for node in border if node.rank in alone),
        loss_kept_bytes=max(0, sum(step.storages[s].nbytes for s in kept) - tangent_bytes),
        loss_input_bytes=loss_input_bytes,
    )


def _is_input(storage: Storage) -> bool:
    """Whether a storage is live before the step and does not belong to the model."""
    return storage.static and storage.kind in (Kind.INPUT, Kind.OTHER)


def _temporary_peak(step: Step, nodes: Sequence[Node]) -> int:
    """The peak of the storages that these nodes make."""
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
