"""A captured step on one of several processes: with shards of the parameters, and exchanges.

The graphs compute with unsharded parameters. Exchange nodes between the graphs own the bytes of these
parameters. Such a node has no op and keeps gathered and reduced storages live. A parameter's own storage
becomes its shard.

    weight (whole) ── graph        all-gather ─ copy out ── graph ── reshard
                                   weight (shard)
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from lowtide.analyze.analysis import NO_GRAPH, Analysis
from lowtide.facts import Kind, Node, Region
from lowtide.facts.sharding import Part, Sharding
from lowtide.parallel.exchange import Exchange, ExchangeStep, exchange
from lowtide.trace.segments import Trace


def shard(analysis: Analysis, trace: Trace, sharding: Sharding, *, trained: Mapping[int, str]) -> None:
    """Shard the parameters in the facts of a step, in place, for one process of `sharding`. `trained`: the
    names of parameters that may get a gradient, by identity."""
    parts = {part.name: part for unit in sharding.units for part in unit.parts}
    gradients = _shard_parameters(analysis, parts)
    outside: dict[str, int] = {}
    if trace.uncaptured_bytes:  # what no graph reads is most likely read by that code
        outside = {
            name: key for key, name in trained.items() if name in parts and key not in analysis.gradients
        }
    for name, key in outside.items():
        nbytes = parts[name].whole_bytes
        analysis.gradients[key] = analysis.add_storage(nbytes=nbytes, kind=Kind.GRADIENT, name=name)
    names = {*gradients, *outside}
    _insert(analysis, exchange(sharding, trace.passages, trained=names, outside=outside), gradients)


def _shard_parameters(analysis: Analysis, parts: Mapping[str, Part]) -> dict[str, int]:
    """Give parameters the size of their shards, and let unsharded gradients be freed; returns the storages of
    these gradients by name."""
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


def _insert(analysis: Analysis, exchanges: Exchange, gradients: Mapping[str, int]) -> None:
    """Put the exchange nodes between the graphs, and renumber all ranks."""
    holders = _holders(analysis, gradients)
    old, analysis.nodes = analysis.nodes, []
    rank: dict[int, int] = {}
    made: dict[str, int] = {}
    for item in _in_order(old, exchanges):
        if isinstance(item, Node):
            rank[item.rank] = len(analysis.nodes)
            analysis.nodes.append(item)
        else:
            step, region = item
            freed = [rank[holders[name]] for name in step.gradients if holders.get(name) in rank]
            _add(analysis, step, region, made, freed)
    analysis.renumber(rank)


def _holders(analysis: Analysis, gradients: Mapping[str, int]) -> dict[str, int]:
    """For each gradient, the node that keeps it and the fewest others live: a tuple's item, not the tuple."""
    wanted = set(gradients.values())
    found: dict[int, Node] = {}
    for node in analysis.nodes:
        for storage in wanted.intersection(node.holds):
            if storage not in found or len(node.holds) < len(found[storage].holds):
                found[storage] = node
    return {name: found[storage].rank for name, storage in gradients.items()}


def _in_order(nodes: list[Node], exchanges: Exchange) -> Iterator[Node | tuple[ExchangeStep, Region]]:
    """Nodes and exchange steps in order; graphs without nodes have exchange steps, too."""
    num_graphs = 1 + max(node.segment for node in nodes)
    groups: dict[tuple[Region, int], list[Node]] = {}
    graph = 0
    for node in nodes:
        # a forward node of no graph follows the last graph before it
        is_between = node.segment == NO_GRAPH and node.region is Region.FORWARD
        graph = graph if is_between else node.segment
        groups.setdefault((node.region, graph), []).append(node)
    for graph in range(max([num_graphs, *(1 + key for key in exchanges.forward)])):
        for step in exchanges.forward.get(graph, ()):
            yield step, Region.FORWARD
        yield from groups.get((Region.FORWARD, graph), ())
    for graph in range(
        max([num_graphs, *(1 + key for key in (*exchanges.before, *exchanges.after))]) - 1, -2, -1
    ):
        for step in exchanges.before.get(graph, ()):
            yield step, Region.BACKWARD
        yield from groups.get((Region.BACKWARD, graph), ())
        for step in exchanges.after.get(graph, ()):
            yield step, Region.BACKWARD
    for step in exchanges.last:
        yield step, Region.BACKWARD


def _add(
    analysis: Analysis, step: ExchangeStep, region: Region, made: dict[str, int], freed: list[int]
) -> None:
    storages = tuple(
        analysis.add_storage(nbytes=nbytes, kind=kind, name=name, pinned=step.kept)
        for name, (nbytes, kind) in step.makes.items()
    )
    reads = tuple(dict.fromkeys([*(made[name] for name in step.frees), *freed]))
    place = _add_node(analysis, step.name, region, reads=reads, makes=storages)
    made.update(dict.fromkeys(step.makes, place))
    if step.workspace_bytes:
        workspace = analysis.add_storage(nbytes=step.workspace_bytes, kind=Kind.OTHER, name=step.name)
        _add_node(analysis, f"{step.name}, inside", region, reads=(), makes=(workspace,))


def _add_node(
    analysis: Analysis, name: str, region: Region, *, reads: tuple[int, ...], makes: tuple[int, ...]
) -> int:
    return analysis.add_node(
        name=name,
        op="exchange",
        region=region,
        segment=NO_GRAPH,
        reads=reads,
        holds=makes,
        makes=makes,
        fixed="an exchange with other processes",
    )
