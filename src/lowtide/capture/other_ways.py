"""Ways to run backward ops other than one by one, whole: recipes that stand in for what leads to them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from lowtide import methods
from lowtide.capture.overwrites import overwrites
from lowtide.capture.records import Analysis, GraphState
from lowtide.facts import Recipe
from lowtide.torchside.calls import Call
from lowtide.torchside.ops.backward_chains import stood_in_for


def add_other_ways(
    analysis: Analysis, state: GraphState, ops: Sequence[fx.Node], written_over: Mapping[fx.Node, Call]
) -> None:
    """Add recipes to the backward ops `ops` of a graph, which run in this order; `written_over` is what they
    call where they do so one by one.

    A chain is left out where another op could not write over what it reads any more, and where it would read
    what the step changes in place.
    """
    done: set[fx.Node] = set()
    for end in reversed(ops):
        fit = [] if end in done or state.rank.get(end) is None else methods.standing_in(end)
        if not fit:
            continue
        inner = stood_in_for(end)
        done.update(inner)
        ran = [node for node in ops if node not in inner]
        recipes = []
        for method in fit:
            call = method.call(end, ())
            over = overwrites(state.segment, ran, {end: call})
            if {*over, end, *inner} == {*written_over, end, *inner}:
                recipes.append(_recipe(analysis, state, end, call, method.name, is_over=end in over))
        rank = state.rank[end]
        analysis.nodes[rank] = replace(analysis.nodes[rank], recipes=tuple(r for r in recipes if r))


def _recipe(
    analysis: Analysis, state: GraphState, end: fx.Node, call: Call, method: str, *, is_over: bool
) -> Recipe | None:
    node = analysis.nodes[state.rank[end]]
    sources: dict[fx.Node, None] = {}
    fx.node.map_arg((call.args, call.kwargs), sources.setdefault)
    if any(state.changed.intersection(state.holds[source]) for source in sources):
        return None
    saved_bytes = sum(analysis.storages[made].nbytes for made in node.makes) if is_over else 0
    return Recipe(
        method=method,
        reads=tuple(state.rank[source] for source in sources),
        holds=node.holds,
        makes=node.makes,
        workspace_bytes=-saved_bytes,
    )
