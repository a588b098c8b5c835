"""Uncaptured code in the facts of a step: nodes without ops between the graphs. They keep as many bytes live
as the watch saw."""

from dataclasses import replace

from lowtide.analyze.analysis import NO_GRAPH, Analysis, GraphAnalysis
from lowtide.facts import FRAMES, Kind, Region
from lowtide.trace.segments import Execution, Trace
from lowtide.trace.uncaptured import UncapturedCode, UncapturedPoint

NAME = "held by code outside of the graphs"


def add_uncaptured_bytes(analysis: Analysis, states: list[GraphAnalysis], trace: Trace) -> None:
    """Add the bytes that autograd saves for uncaptured code. They are live from the end of the graph before
    the code until the backward pass of that graph begins; without such a graph, throughout the step."""
    graphs = [state for state in states if state.segment.differentiable]
    for before, nbytes in sorted(trace.uncaptured_bytes.items()):
        state = graphs[before - 1] if before else None
        arrived = [state.rank[node] for node in state.tangents if node in state.rank] if state else []
        made = analysis.add_storage(nbytes=nbytes, kind=Kind.OTHER, name=NAME, static=not arrived)
        if state is None or not arrived:
            continue
        end = analysis.ends[Region.FORWARD, state.index]
        output, tangent = analysis.nodes[end], analysis.nodes[max(arrived)]
        analysis.nodes[end] = replace(output, makes=(*output.makes, made), holds=(*output.holds, made))
        analysis.nodes[tangent.rank] = replace(tangent, reads=(*tangent.reads, end))


def add_frames(
    analysis: Analysis, state: GraphAnalysis, execution: Execution, states: list[GraphAnalysis]
) -> None:
    """Keep outputs of earlier graphs live to the end of a graph, as the frames of Python around it do.

    At a graph break, torch.compile calls the rest of a function as a function of its own. The frames before
    the break stay until the whole function returns, with the values that they passed on. Eager has one frame.
    """
    outputs = [states[index].outputs[output] for index, output in sorted(execution.in_frames)]
    reads = [
        states[index].rank[node]
        for (index, _), node in zip(sorted(execution.in_frames), outputs, strict=True)
        if node is not None
    ]
    if reads:
        analysis.add_node(
            name=f"frames_{state.index}",
            op=FRAMES,
            region=Region.FORWARD,
            segment=NO_GRAPH,
            reads=tuple(dict.fromkeys(reads)),
            fixed="runs outside of the graphs",
        )


def add_uncaptured_code(analysis: Analysis, states: list[GraphAnalysis], code: UncapturedCode) -> None:
    """Insert the time points that were seen between the graphs, and renumber all ranks."""
    points = {*code.inside_bytes, *code.live_outputs, *code.calls}
    points |= {point for point, _ in code.gradients.values()}
    points |= {point for live_range in code.live_ranges for point in live_range if point is not None}
    outputs = {
        (state.index, place): state.rank[node]
        for state in states
        for place, node in enumerate(state.outputs)
        if node is not None
    }
    before: dict[int, list[UncapturedPoint]] = {}
    for point in sorted(points, key=lambda point: point.order):
        before.setdefault(_next_rank(analysis, point), []).append(point)
    old, analysis.nodes = analysis.nodes, []
    rank: dict[int, int] = {}
    made: dict[UncapturedPoint | None, list[int]] = {}
    for position, node in enumerate((*old, None)):
        for point in before.get(position, ()):
            live = [rank[outputs[place]] for place in code.live_outputs.get(point, ()) if place in outputs]
            _add_point(analysis, code, point, made, live)
        if node is not None:
            rank[node.rank] = len(analysis.nodes)
            analysis.nodes.append(node)
    analysis.renumber(rank)


def _next_rank(analysis: Analysis, point: UncapturedPoint) -> int:
    """The rank of the first node after a time point."""
    last_graph = point.graph if point.region is Region.BACKWARD else point.graph - 1
    end = analysis.ends.get((point.region, last_graph))
    if end is not None:
        return end + 1
    if point.region is Region.BACKWARD:
        return len(analysis.nodes)
    before = [rank for rank in (analysis.earlier, analysis.last_outputs) if rank is not None]
    return 1 + max(before, default=-1)


def _add_point(
    analysis: Analysis,
    code: UncapturedCode,
    point: UncapturedPoint,
    made: dict[UncapturedPoint | None, list[int]],
    live: list[int],
) -> None:
    for parameter, (first, nbytes) in code.gradients.items():
        if first == point and parameter not in analysis.gradients:
            storage = analysis.add_storage(nbytes=nbytes, kind=Kind.GRADIENT, name=NAME, pinned=True)
            analysis.gradients[parameter] = storage
            _add_node(analysis, point, makes=(storage,))
    for live_range, nbytes in code.live_ranges.items():
        if live_range.first == point:
            pinned = live_range.last is None
            storage = analysis.add_storage(nbytes=nbytes, kind=Kind.OTHER, name=NAME, pinned=pinned)
            made.setdefault(live_range.last, []).append(_add_node(analysis, point, makes=(storage,)))
    reads = tuple(dict.fromkeys([*made.get(point, ()), *live]))
    node = _add_node(analysis, point, reads=reads, inside_bytes=code.inside_bytes.get(point, 0))
    if point in code.calls:
        analysis.uncaptured_calls[node] = code.calls[point]


def _add_node(
    analysis: Analysis,
    point: UncapturedPoint,
    *,
    reads: tuple[int, ...] = (),
    makes: tuple[int, ...] = (),
    inside_bytes: int = 0,
) -> int:
    return analysis.add_node(
        name=f"outside_{len(analysis.nodes)}",
        op="outside",
        region=point.region,
        segment=NO_GRAPH,
        reads=reads,
        holds=makes,
        makes=makes,
        workspace_bytes=inside_bytes,
        fixed="runs outside of the graphs",
    )
