"""Put the reads of resting weights into a joint graph, and number its schedule accordingly.

    captured   weight ─ t ─ mm                        planned   weight ─ fetched ─ t ─ mm

An op reads the last fetch before it of the same weight; the ops of backward read the last one of all. In
the new graph a fetch is a forward op like any other, which can be run again in backward. `runtime/rewrite.py`
writes it as a start and a wait.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from lowtide.facts import GraphRun
from lowtide.offload.fetched_weight import fetched
from lowtide.torch_compat.dispatch import storage_key
from lowtide.trace.segments import Segment, edited

Fetches = Sequence[tuple[int, int, int]]
"""Of one graph (`facts.Graph`)."""


@dataclass(frozen=True, slots=True)
class WithFetches:
    """A graph with its fetches as ops, and its schedule by the positions of all ops. `begins` has, by
    the position of each fetch, that of the op before which its read begins."""

    segment: Segment
    schedule: tuple[GraphRun, ...]
    releases: tuple[tuple[int, int], ...]
    begins: Mapping[int, int]


def with_fetches(
    segment: Segment, schedule: Sequence[GraphRun], releases: Sequence[tuple[int, int]], fetches: Fetches
) -> WithFetches:
    """The graph with an op for each of `fetches`. Preserves all other ops and their order."""
    if not fetches:
        return WithFetches(segment, tuple(schedule), tuple(releases), {})
    names = [node.name for node in segment.forward_ops]
    added: list[str] = []
    new = edited(segment, lambda joint: added.extend(_added(joint, segment, names, fetches)))
    ops = [node.name for node in (*new.forward_ops, *new.backward_ops)]
    place = {name: position for position, name in enumerate(ops)}
    old = [place[node.name] for node in (*segment.forward_ops, *segment.backward_ops)]

    def position(number: int) -> int:
        return old[number] if number >= 0 else place[added[-1 - number]]

    return WithFetches(
        new,
        tuple(GraphRun(position(run.position), run.rule) for run in schedule),
        tuple((position(op), position(after)) for op, after in releases),
        {place[name]: old[before] for name, (_, _, before) in zip(added, fetches, strict=True)},
    )


def _added(joint: fx.GraphModule, segment: Segment, names: Sequence[str], fetches: Fetches) -> list[str]:
    """Add the fetches to a copy of the graph of `segment`; their names."""
    graph = joint.graph
    by_name = {node.name: node for node in graph.nodes}
    position = {name: number for number, name in enumerate(names)}
    found: list[fx.Node] = []
    mine: dict[fx.Node, list[tuple[int, fx.Node]]] = {}
    for place, first, _ in fetches:
        weight = by_name[segment.primals[place].name]
        with graph.inserting_before(by_name[names[first]]):
            node = graph.call_function(fetched, (weight,))
        node.meta = {key: weight.meta[key] for key in ("val",) if key in weight.meta}
        found.append(node)
        mine.setdefault(weight, []).append((first, node))
    for weight, some in mine.items():
        some.sort(key=lambda pair: pair[0])
        for reader in [user for user in weight.users if user not in found]:
            if reader.op == "output":
                continue
            at = position.get(reader.name, len(names))
            before = [node for first, node in some if first <= at]
            assert before, f"'{reader.name}' reads a weight before it is fetched"
            reader.replace_input_with(weight, before[-1])
    return [node.name for node in found]


def fetched_storages(segment: Segment, values: Iterable[fx.Node]) -> set[int]:
    """The storages of fetched weights among `values`; a fetch has the same fake value as its weight."""
    keys = {node: storage_key(node.meta["val"]) for node in segment.forward_ops if node.target is fetched}
    weights = {node.args[0] for node in keys}
    read = {storage_key(v.meta["val"]) for v in values if keys and _is_tensor(v) and v not in weights}
    return read.intersection(keys.values())


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)
