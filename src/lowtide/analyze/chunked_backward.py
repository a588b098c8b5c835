"""Ways to run backward ops other than one by one, whole: remats that stand in for what leads to them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from lowtide.analyze.analysis import Analysis, GraphState
from lowtide.analyze.overwrites import overwrites
from lowtide.facts import Remat
from lowtide.ops.backward_chunks import stood_in_for
from lowtide.ops.calls import Call
from lowtide.remat import standing_in


def add_other_ways(
    analysis: Analysis, state: GraphState, ops: Sequence[fx.Node], written_over: Mapping[fx.Node, Call]
) -> None:
    """Add remats to the backward ops `ops` of a graph, which run in this order; `written_over` is what they
    call where they do so one by one.

    A chain is left out where another op could not write over what it reads any more, and where it would read
    what the step changes in place.
    """
    done: set[fx.Node] = set()
    for end in reversed(ops):
        fit = [] if end in done or state.rank.get(end) is None else standing_in(end)
        if not fit:
            continue
        inner = stood_in_for(end)
        done.update(inner)
        ran = [node for node in ops if node not in inner]
        remats = []
        for method in fit:
            call = method.call(end, ())
            over = overwrites(state.segment, ran, {end: call})
            if {*over, end, *inner} == {*written_over, end, *inner}:
                remats.append(_remat(analysis, state, end, call, method.name, is_over=end in over))
        rank = state.rank[end]
        analysis.nodes[rank] = replace(analysis.nodes[rank], remats=tuple(r for r in remats if r))


def _remat(
    analysis: Analysis, state: GraphState, end: fx.Node, call: Call, method: str, *, is_over: bool
) -> Remat | None:
    node = analysis.nodes[state.rank[end]]
    sources: dict[fx.Node, None] = {}
    fx.node.map_arg((call.args, call.kwargs), sources.setdefault)
    if any(state.changed.intersection(state.holds[source]) for source in sources):
        return None
    saved_bytes = sum(analysis.storages[made].nbytes for made in node.makes) if is_over else 0
    return Remat(
        rule=method,
        reads=tuple(state.rank[source] for source in sources),
        holds=node.holds,
        makes=node.makes,
        workspace_bytes=-saved_bytes,
    )
