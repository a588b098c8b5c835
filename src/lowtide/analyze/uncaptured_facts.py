"""Code outside of the graphs in the facts of a step: nodes without ops between the graphs, which hold what
such code was seen to hold."""

from collections.abc import Mapping
from dataclasses import replace

from lowtide.analyze.analysis import Analysis, GraphAnalysis
from lowtide.analyze.gradient_facts import EARLIER, UNCAPTURED
from lowtide.facts import Kind, Node, Region
from lowtide.trace.uncaptured import UncapturedCode, UncapturedPoint

NO_GRAPH = -1
"""The segment of nodes that belong to no graph."""


def add_uncaptured_code(analysis: Analysis, states: list[GraphAnalysis], outside: UncapturedCode) -> None:
    """Put what was seen between the graphs, and count all ranks anew."""
    moments = {*outside.inside_bytes, *outside.alive, *outside.calls}
    moments |= {moment for moment, _ in outside.gradients.values()}
    moments |= {moment for stay in outside.stays for moment in stay if moment is not None}
    outputs = {
        (state.index, place): state.rank[node]
        for state in states
        for place, node in enumerate(state.outputs)
        if node is not None
    }
    places: dict[int, list[UncapturedPoint]] = {}
    for moment in sorted(moments, key=lambda moment: moment.order):
        places.setdefault(_place(analysis, moment), []).append(moment)
    old, analysis.nodes = analysis.nodes, []
    rank: dict[int, int] = {}
    made: dict[UncapturedPoint | None, list[int]] = {}
    for position, node in enumerate((*old, None)):
        for moment in places.get(position, ()):
            alive = [rank[outputs[place]] for place in outside.alive.get(moment, ()) if place in outputs]
            _add(analysis, outside, moment, made, alive)
        if node is not None:
            rank[node.rank] = len(analysis.nodes)
            analysis.nodes.append(node)
    for place, node in enumerate(analysis.nodes):
        if node.segment != NO_GRAPH:
            analysis.nodes[place] = renumbered(node, rank)
    analysis.graph_nodes = {rank[key]: place for key, place in analysis.graph_nodes.items()}
    analysis.kept = {rank[key]: kept for key, kept in analysis.kept.items()}


def _place(analysis: Analysis, moment: UncapturedPoint) -> int:
    """The rank before which a moment is."""
    last_graph = moment.graph if moment.region is Region.BACKWARD else moment.graph - 1
    ends = [
        node.rank
        for node in analysis.nodes
        if (node.op, node.region, node.segment) == ("output", moment.region, last_graph)
    ]
    if ends:
        return ends[-1] + 1
    is_first = analysis.nodes[0].name == EARLIER
    return int(is_first) if moment.region is Region.FORWARD else len(analysis.nodes)


def _add(
    analysis: Analysis,
    outside: UncapturedCode,
    moment: UncapturedPoint,
    made: dict[UncapturedPoint | None, list[int]],
    alive: list[int],
) -> None:
    for parameter, (first, nbytes) in outside.gradients.items():
        if first == moment and parameter not in analysis.gradients:
            storage = analysis.add_storage(nbytes=nbytes, kind=Kind.GRADIENT, name=UNCAPTURED, pinned=True)
            analysis.gradients[parameter] = storage
            _add_node(analysis, moment, makes=(storage,))
    for stay, nbytes in outside.stays.items():
        if stay.first == moment:
            pinned = stay.last is None
            storage = analysis.add_storage(nbytes=nbytes, kind=Kind.OTHER, name=UNCAPTURED, pinned=pinned)
            made.setdefault(stay.last, []).append(_add_node(analysis, moment, makes=(storage,)))
    reads = tuple(dict.fromkeys([*made.get(moment, ()), *alive]))
    node = _add_node(analysis, moment, reads=reads, inside_bytes=outside.inside_bytes.get(moment, 0))
    if moment in outside.calls:
        analysis.uncaptured_calls[node] = outside.calls[moment]


def _add_node(
    analysis: Analysis,
    moment: UncapturedPoint,
    *,
    reads: tuple[int, ...] = (),
    makes: tuple[int, ...] = (),
    inside_bytes: int = 0,
) -> int:
    return analysis.add_node(
        name=f"outside_{len(analysis.nodes)}",
        op="outside",
        region=moment.region,
        kind=Kind.OTHER,
        segment=NO_GRAPH,
        reads=reads,
        holds=makes,
        makes=makes,
        workspace_bytes=inside_bytes,
        fixed="runs outside of the graphs",
    )


def renumbered(node: Node, rank: Mapping[int, int]) -> Node:
    """The same node where others have new ranks."""
    return replace(
        node,
        rank=rank[node.rank],
        reads=tuple(rank[read] for read in node.reads),
        eager_reads=tuple(rank[read] for read in node.eager_reads),
        remats=tuple(
            replace(remat, reads=tuple(rank[read] for read in remat.reads)) for remat in node.remats
        ),
    )
