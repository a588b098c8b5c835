"""The data of the page's charts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lowtide.facts import Action, Activation, Decision, Region, Solution, Step
from lowtide.planning.simulate import Timeline, source_of
from lowtide.report import style
from lowtide.report.live_tensors import pack_blocks, pack_storages
from lowtide.report.page_packing import pack_integers, pack_strings
from lowtide.report.results import Measurement, TradeoffPoint
from lowtide.report.style import COLOURS, DIRECTIONS, LABELS, STACK
from lowtide.report.times import run_waits, traffic_of

WITHOUT, WITH = "baseline", "with the plan"


def page_data(
    *,
    step: Step | None,
    before: Timeline | None,
    after: Timeline | None,
    solution: Solution | None,
    tradeoff: Sequence[TradeoffPoint],
    without_offload: Sequence[TradeoffPoint],
    activations: Sequence[Activation | Decision],
    step_seconds: float,
    made_on_curve: bool = True,
) -> dict[str, Any]:
    """The data of all scripts; sections without data are None."""
    budget = solution.budget_bytes if solution else None
    made = made_index(tradeoff, solution)
    timeline = None
    if step is not None and before is not None:
        timeline = _timeline(step, before, after) | {"budget": budget}
    points = _tradeoff(tradeoff, activations, step_seconds) | {
        "budget": budget,
        "selected": len(tradeoff) // 2 if made is None else made,
        "made": made,
        "made_on_curve": made_on_curve,
        "without_offload": [
            [point.peak_bytes, point.recompute_seconds / step_seconds]
            for point in without_offload
            if step_seconds
        ],
    }
    return {
        "kinds": [{"label": LABELS[kind], "colour": COLOURS[kind]} for kind in STACK],
        "directions": DIRECTIONS,
        "timeline": timeline,
        "tradeoff": points if tradeoff else None,
    }


def _timeline(step: Step, before: Timeline, after: Timeline | None) -> dict[str, Any]:
    regions = list(Region)
    nodes = step.nodes
    return {
        "names": [node.name for node in nodes],
        "ops": pack_strings([node.op for node in nodes]),
        "modules": pack_strings([node.module for node in nodes]),
        "sources": pack_strings([style.short_source(node.source) for node in nodes]),
        "regions": pack_integers(regions.index(node.region) for node in nodes),
        "region_names": [str(region) for region in regions],
        "storages": pack_storages(step),
        "before": _way(step, before, WITHOUT) | {"blocks": pack_blocks(step, before, is_baseline=True)},
        "after": None
        if after is None
        else _way(step, after, WITH) | {"blocks": pack_blocks(step, after, is_baseline=False)},
    }


def _way(step: Step, timeline: Timeline, label: str) -> dict[str, Any]:
    """One schedule of the step; `methods` are the remat rules of its runs, empty for first runs."""
    said = dict(step.rules)
    return {
        "label": label,
        "order": pack_integers(timeline.order),
        "ns": pack_integers(round(source_of(step, run).seconds * 1e9) for run in timeline.runs),
        "methods": pack_strings([said.get(run.rule, run.rule) for run in timeline.runs]),
        "kinds": [pack_integers(timeline.bytes_by_kind[kind].tolist()) for kind in STACK],
        "peak": timeline.peak_position,
        **_transfers(timeline),
    }


def _transfers(timeline: Timeline) -> dict[str, Any]:
    """The stalls before each run, and the transfers; empty for a step without offload."""
    traffic = traffic_of(timeline)
    if traffic is None:
        return {}
    moves = traffic.transfers
    return {
        "waits": pack_integers(round(wait * 1e9) for wait in run_waits(timeline)),
        "transfers": {
            "node": pack_integers(move.node for move in moves),
            "write": pack_integers(int(move.is_write) for move in moves),
            "bytes": pack_integers(move.nbytes for move in moves),
            "begin": pack_integers(round(move.begin_seconds * 1e9) for move in moves),
            "end": pack_integers(round(move.end_seconds * 1e9) for move in moves),
            "asked": pack_integers(move.asked_at for move in moves),
            "awaited": pack_integers(
                move.awaited_at if move.awaited_at >= 0 else move.asked_at for move in moves
            ),
        },
    }


def _tradeoff(
    points: Sequence[TradeoffPoint], activations: Sequence[Activation | Decision], step_seconds: float
) -> dict[str, Any]:
    sizes = {activation.name: activation.nbytes for activation in activations}
    for point in points:
        for name in (*point.recomputed, *point.offloaded):
            sizes.setdefault(name, 0)
    index = {name: i for i, name in enumerate(sizes)}
    return {
        "names": list(sizes),
        "sizes": pack_integers(sizes.values()),
        "points": [
            {
                "peak": point.peak_bytes,
                "overhead": point.recompute_seconds / step_seconds if step_seconds else 0.0,
                "least": None
                if point.lower_bound_seconds is None or not step_seconds
                else point.lower_bound_seconds / step_seconds,
                "measured": style.measured_place(point),
                "recomputed": pack_integers(sorted(index[name] for name in point.recomputed)),
                "offloaded": pack_integers(sorted(index[name] for name in point.offloaded)),
            }
            for point in points
        ],
    }


def made_index(points: Sequence[TradeoffPoint], solution: Solution | None) -> int | None:
    """Where the plan that was made stands among the points; None where it does not."""
    if solution is None:
        return None
    same = (solution.peak_bytes, solution.recompute_seconds)
    return next((i for i, at in enumerate(points) if (at.peak_bytes, at.recompute_seconds) == same), None)


def with_made(
    points: Sequence[TradeoffPoint], solution: Solution | None, measurement: Measurement | None
) -> list[TradeoffPoint]:
    """The points of a curve by rising peak, the plan that was made and its measurement among them."""
    found = sorted(points, key=lambda point: (point.peak_bytes, point.recompute_seconds))
    if solution is None or not points:
        return found
    at = made_index(found, solution)
    made = found[at] if at is not None else _point_of(solution)
    if measurement is not None and measurement.overhead is not None:
        made = replace(
            made,
            measured_peak_bytes=measurement.planned.measured_peak_bytes,
            measured_overhead=measurement.overhead,
            measured_noise=measurement.noise,
        )
    others = [point for point in found if point is not (found[at] if at is not None else None)]
    return sorted([*others, made], key=lambda point: (point.peak_bytes, point.recompute_seconds))


def _point_of(solution: Solution) -> TradeoffPoint:
    return TradeoffPoint(
        peak_bytes=solution.peak_bytes,
        recompute_seconds=solution.recompute_seconds,
        recomputed=tuple(d.name for d in solution.decisions if d.action is Action.RECOMPUTE),
        offloaded=tuple(d.name for d in solution.decisions if d.action is Action.OFFLOAD),
        lower_bound_seconds=solution.lower_bound_seconds,
    )
