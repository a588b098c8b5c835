"""A profile, a plan or a verification in a few lines of text, and as figures and SVG for a notebook.

All text is escaped. There are no scripts: notebooks of other users do not run them.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from markupsafe import Markup

from lowtide.facts import Action, Kind, Solution, Step
from lowtide.planning.simulate import Bytes, Timeline
from lowtide.report import style
from lowtide.report.module_summary import module_lines
from lowtide.report.resting import resting_lines
from lowtide.report.style import LABELS, STACK, duration, how_good, percent, reserved_text, size

Rows = list[tuple[str, str]]


def profile_rows(step: Step, timeline: Timeline) -> Rows:
    node = step.nodes[timeline.peak_rank]
    place = ", ".join(filter(None, (str(node.region), node.module, node.source)))
    return [
        ("peak", f"{size(timeline.peak_bytes)} at '{node.name}' ({place})"),
        ("of which", ", ".join(f"{LABELS[kind]} {size(nbytes)}" for kind, nbytes in _at_peak(timeline))),
        ("step", f"{duration(timeline.seconds)}, {len(step.nodes)} nodes on {step.device}"),
        *(("note", note) for note in step.notes),
    ]


def plan_rows(solution: Solution) -> Rows:
    fates = [decision.action for decision in solution.decisions]
    counts = ", ".join(f"{fates.count(action)} {action.lower()}" for action in Action if action in fates)
    saved = solution.peak_bytes / solution.baseline_peak_bytes - 1 if solution.baseline_peak_bytes else None
    return [
        *_budget(solution),
        ("peak", f"{size(solution.peak_bytes)}, predicted, at '{solution.peak_node}'"),
        ("baseline", f"{size(solution.baseline_peak_bytes)} ({percent(saved)})"),
        (
            "time added",
            f"{duration(solution.recompute_seconds)} ({percent(solution.overhead)}), "
            f"{how_good(solution.gap)}",
        ),
        *(
            [("rounds", f"{', '.join(solution.rounds)}: not equal to eager to the last bit")]
            if solution.rounds
            else []
        ),
        ("activations", counts or "none"),
        *(("resting", line) for line in resting_lines(solution)),
        *(("by module" if not i else "", line) for i, line in enumerate(module_lines(solution.decisions))),
        *(("note", note) for note in solution.notes),
    ]


def _budget(solution: Solution) -> Rows:
    found = solution.reserved
    if found is None:
        return [("budget", size(solution.budget_bytes))]
    wanted = f"{size(found.budget_bytes)} reserved, " if found.budget_bytes is not None else ""
    return [("budget", f"{wanted}{size(solution.budget_bytes)}"), ("reserved", reserved_text(found))]


def as_text(title: str, rows: Rows) -> str:
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def _at_peak(timeline: Timeline) -> list[tuple[Kind, int]]:
    at = {kind: int(timeline.bytes_by_kind[kind][timeline.peak_position]) for kind in STACK}
    return [(kind, nbytes) for kind, nbytes in at.items() if nbytes]


WIDTH, HEIGHT = 720, 220
LEFT, TOP, BOTTOM = 70, 10, 22
MOST_POINTS = 240
"""The most points to draw; of the ops in between, the highest is shown."""


def card(title: str, rows: Sequence[tuple[str, str]], picture: str = "") -> str:
    """A title, a table of figures and a picture."""
    cells = [
        Markup(
            '<tr><td style="text-align:left">{}</td><td style="text-align:left"><b>{}</b></td></tr>'
        ).format(name, value)
        for name, value in rows
    ]
    table = Markup("<table>{}</table>").format(Markup("").join(cells))
    return str(Markup("<div><b>{}</b>{}{}</div>").format(title, table, Markup(picture)))


def timeline_svg(shown: Timeline, *, other: Timeline | None = None, budget_bytes: int | None = None) -> str:
    """Live bytes over the ops of `shown`, by kind; the total of `other` as a line, the budget as another."""
    if not shown.runs:
        return ""
    top = max(shown.peak_bytes, other.peak_bytes if other else 0, budget_bytes or 0, 1)
    columns = _columns(shown.live_bytes)
    drawn = []
    below = np.zeros(len(columns), dtype=np.int64)
    for kind in style.STACK:
        above = below + shown.bytes_by_kind[kind][columns]
        if above.any() and (above != below).any():
            points = [*_points(above, top), *reversed(_points(below, top))]
            drawn.append(
                Markup('<polygon points="{}" fill="{}"><title>{}</title></polygon>').format(
                    " ".join(points), style.COLOURS[kind], style.LABELS[kind]
                )
            )
        below = above
    if other is not None:
        points = _points(other.live_bytes[_columns(other.live_bytes)], top)
        drawn.append(_line(points, style.BEFORE, "baseline"))
    if budget_bytes is not None:
        y = _y(budget_bytes, top)
        drawn.append(_line([f"{LEFT},{y:.1f}", f"{WIDTH},{y:.1f}"], style.BUDGET, "budget"))
    drawn += [
        Markup('<text x="{}" y="{:.1f}" text-anchor="end" font-size="11" fill="#777">{}</text>').format(
            LEFT - 6, _y(value, top) + 4, size(value)
        )
        for value in (0, top // 2, top)
    ]
    peak = f"peak {size(shown.peak_bytes)} at {shown.peak_node}"
    caption = f"live bytes over {len(shown.runs)} ops, simulated; {peak}"
    drawn.append(
        Markup('<text x="{}" y="{}" font-size="11" fill="#777">{}</text>').format(LEFT, HEIGHT - 6, caption)
    )
    return str(
        Markup(
            '<svg viewBox="0 0 {w} {h}" style="max-width:{w}px;width:100%" role="img">{drawn}</svg>'
        ).format(w=WIDTH, h=HEIGHT, drawn=Markup("").join(drawn))
    )


def _columns(live: Bytes) -> Bytes:
    """Positions to draw: all, or of every few the highest."""
    edges = np.linspace(0, len(live), min(len(live), MOST_POINTS) + 1).astype(np.int64)
    return np.array([low + live[low:high].argmax() for low, high in pairwise(edges)], dtype=np.int64)


def _points(values: Bytes, top: int) -> list[str]:
    step = (WIDTH - LEFT) / max(1, len(values) - 1)
    return [f"{LEFT + i * step:.1f},{_y(int(value), top):.1f}" for i, value in enumerate(values)]


def _y(value: int, top: int) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top)


def _line(points: Sequence[str], colour: str, title: str) -> Markup:
    return Markup(
        '<polyline points="{}" fill="none" stroke="{}" stroke-width="1.5"><title>{}</title></polyline>'
    ).format(" ".join(points), colour, title)
