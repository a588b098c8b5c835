"""A captured step on one of several processes: with its part of the parameters, and all that is exchanged.

The graphs are those of whole parameters. Their bytes are the exchange's: nodes without ops between the
graphs, which hold what is gathered and reduced. A parameter's own storage becomes this process's part of it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from lowtide.analyze.analysis import Analysis
from lowtide.analyze.uncaptured_facts import NO_GRAPH, renumbered
from lowtide.facts import Kind, Node, Region
from lowtide.facts.sharding import Part, Sharding
from lowtide.parallel.exchange import Exchange, ExchangeStep, exchange
from lowtide.trace.segments import Trace


def shard(analysis: Analysis, trace: Trace, sharding: Sharding) -> None:
    """Add to the facts of whole graphs what `sharding` makes of them, in place."""
    parts = {part.name: part for unit in sharding.units for part in unit.parts}
    gradients = _as_parts(analysis, parts)
    moves = exchange(sharding, trace.passages, trained=gradients)
    _insert(analysis, moves, gradients)


def _as_parts(analysis: Analysis, parts: Mapping[str, Part]) -> dict[str, int]:
    """Give parameters the size of their parts, and let whole gradients go; those by name."""
    names: dict[int, str] = {}
    for record in list(analysis.storages):
        if record.kind is Kind.PARAMETER and record.static and record.name in parts:
            analysis.storages[record.id] = replace(record, nbytes=parts[record.name].shard_bytes)
            names[record.id] = record.name
    gradients = {}
    for key, storage in analysis.gradients.items():
        name = names.get(analysis.inputs[key])
        if name is not None:
            gradients[name] = storage
            analysis.storages[storage] = replace(analysis.storages[storage], pinned=False)
    return gradients


def _insert(analysis: Analysis, moves: Exchange, gradients: Mapping[str, int]) -> None:
    """Put the moves between the graphs, and count all ranks anew."""
    holders = _holders(analysis, gradients)
    old, analysis.nodes = analysis.nodes, []
    rank: dict[int, int] = {}
    made: dict[str, int] = {}
    for item in _in_order(old, moves):
        if isinstance(item, Node):
            rank[item.rank] = len(analysis.nodes)
            analysis.nodes.append(item)
        else:
            move, region = item
            freed = [rank[holders[name]] for name in move.gradients if holders[name] in rank]
            _add(analysis, move, region, made, freed)
    for place, node in enumerate(analysis.nodes):
        if node.segment != NO_GRAPH:
            analysis.nodes[place] = renumbered(node, rank)
    analysis.graph_nodes = {rank[key]: place for key, place in analysis.graph_nodes.items()}
    analysis.kept = {rank[key]: kept for key, kept in analysis.kept.items()}


def _holders(analysis: Analysis, gradients: Mapping[str, int]) -> dict[str, int]:
    """The node that holds each of these and the least besides: a part of a tuple, not the whole."""
    wanted = set(gradients.values())
    found: dict[int, Node] = {}
    for node in analysis.nodes:
        for storage in wanted.intersection(node.holds):
            if storage not in found or len(node.holds) < len(found[storage].holds):
                found[storage] = node
    return {name: found[storage].rank for name, storage in gradients.items()}


def _in_order(nodes: list[Node], moves: Exchange) -> Iterator[Node | tuple[ExchangeStep, Region]]:
    """Nodes and moves as they come; moves of graphs that are not there come where these would stand."""
    num_graphs = 1 + max(node.segment for node in nodes)
    groups: dict[tuple[Region, int], list[Node]] = {}
    for node in nodes:
        groups.setdefault((node.region, node.segment), []).append(node)
    for graph in range(max([num_graphs, *(1 + key for key in moves.forward)])):
        for move in moves.forward.get(graph, ()):
            yield move, Region.FORWARD
        yield from groups.get((Region.FORWARD, graph), ())
    for graph in range(max([num_graphs, *(1 + key for key in (*moves.before, *moves.after))]) - 1, -2, -1):
        for move in moves.before.get(graph, ()):
            yield move, Region.BACKWARD
        yield from groups.get((Region.BACKWARD, graph), ())
        for move in moves.after.get(graph, ()):
            yield move, Region.BACKWARD
    for move in moves.last:
        yield move, Region.BACKWARD


def _add(
    analysis: Analysis, move: ExchangeStep, region: Region, made: dict[str, int], freed: list[int]
) -> None:
    storages = tuple(
        analysis.add_storage(nbytes=nbytes, kind=kind, name=name, pinned=move.kept)
        for name, (nbytes, kind) in move.makes.items()
    )
    reads = tuple(dict.fromkeys([*(made[name] for name in move.frees), *freed]))
    place = _add_node(analysis, move.name, region, reads=reads, makes=storages)
    made.update(dict.fromkeys(move.makes, place))
    if move.inside_bytes:
        inside = analysis.add_storage(nbytes=move.inside_bytes, kind=Kind.OTHER, name=move.name)
        _add_node(analysis, f"{move.name}, inside", region, reads=(), makes=(inside,))


def _add_node(
    analysis: Analysis, name: str, region: Region, *, reads: tuple[int, ...], makes: tuple[int, ...]
) -> int:
    return analysis.add_node(
        name=name,
        op="exchange",
        region=region,
        kind=Kind.OTHER,
        segment=NO_GRAPH,
        reads=reads,
        holds=makes,
        makes=makes,
        fixed="an exchange with other processes",
    )
