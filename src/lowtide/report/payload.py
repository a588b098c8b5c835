"""The data of the page's charts, packed so that the page stays small and no data can run as code.

Series of whole numbers change little from one run to the next: they are stored as differences, in bytes of
seven bits, as base64. Repeated strings are stored once and referred to by index. `templates/decode.js` is the
other half.
"""

import base64
import json
from collections.abc import Iterable, Sequence
from typing import Any

from markupsafe import Markup

from lowtide.facts import Activation, Decision, Region, Solution, Step
from lowtide.planning.simulate import Timeline, source_of
from lowtide.report import style
from lowtide.report.results import TradeoffPoint
from lowtide.report.style import COLOURS, DIRECTIONS, LABELS, STACK
from lowtide.report.times import run_waits, traffic_of


def pack_integers(values: Iterable[int]) -> str:
    """Base64 of the zigzag-encoded differences of `values`."""
    packed = bytearray()
    previous = 0
    for value in values:
        difference = value - previous
        previous = value
        rest = 2 * difference if difference >= 0 else -2 * difference - 1
        while rest >= 128:
            packed.append(rest & 127 | 128)
            rest >>= 7
        packed.append(rest)
    return base64.b64encode(packed).decode("ascii")


def pack_strings(values: Sequence[str]) -> dict[str, object]:
    """Distinct strings in order of appearance, and an index into them per value."""
    table: dict[str, int] = {}
    indices = [table.setdefault(value, len(table)) for value in values]
    return {"table": list(table), "index": pack_integers(indices)}


def script_json(data: object) -> Markup:
    """JSON for a `<script type="application/json">`; no name in it can end the element.

    Inside a script element, HTML ends at `</script` and changes state at `<!--`, whatever the
    quotes; `<` is therefore written as an escape, and so are `>`, `&` and JavaScript's line ends.
    """
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


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
) -> dict[str, Any]:
    """The data of all scripts; sections without data are None."""
    budget = solution.budget_bytes if solution else None
    timeline = None
    if step is not None and before is not None:
        timeline = _timeline(step, before, after) | {"budget": budget}
    points = _tradeoff(tradeoff, activations, step_seconds) | {
        "budget": budget,
        "selected": _nearest(tradeoff, solution),
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
        "before": _way(step, before, WITHOUT),
        "after": _way(step, after, WITH) if after is not None else None,
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
                "measured": None
                if point.measured_peak_bytes is None or point.measured_overhead is None
                else [point.measured_peak_bytes, point.measured_overhead],
                "recomputed": pack_integers(sorted(index[name] for name in point.recomputed)),
                "offloaded": pack_integers(sorted(index[name] for name in point.offloaded)),
            }
            for point in points
        ],
    }


def _nearest(points: Sequence[TradeoffPoint], solution: Solution | None) -> int:
    """The point to show first: the one closest to the plan, or the middle of the curve."""
    if solution is None:
        return len(points) // 2
    return min(
        range(len(points)), key=lambda i: (abs(points[i].peak_bytes - solution.peak_bytes), i), default=0
    )
