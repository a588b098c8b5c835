"""Planners against each other: time added against peak memory, above the bound that no plan is below."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lowtide.report import style
from lowtide.report.results import CompareRow, PlannerCurve
from lowtide.report.style import INK, byte_unit, label_axes, legend, new_figure, size, write_beside

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (style.AFTER, style.RECOMPUTE, "#2f9e7e", "#8a6fb0", "#9a5b1e", "#0f7b8a")
MARKS = "osD^vP"
_DASHES = (0, (5, 3))


def plot_pareto(
    curves: Sequence[PlannerCurve],
    *,
    step_seconds: float,
    measured: Sequence[CompareRow] = (),
    budgets: Sequence[int] = (),
) -> "Figure":
    """The simulated curve of each planner, the proven bound below them, and measured methods.

    A method whose results differ from eager's is grey. One whose time is unknown, or mostly noise, is left
    out.
    """
    figure, axes = new_figure("Time added against peak memory, by planner", height=5.2)
    peaks = [point.peak_bytes for curve in curves for point in curve.points]
    unit, scale = byte_unit(max([*peaks, *(row.peak_bytes or 0 for row in measured)], default=0))
    for number, curve in enumerate(curves):
        _curve(axes, curve, number, scale=scale, step_seconds=step_seconds)
    _bound(axes, curves, scale=scale, step_seconds=step_seconds)
    timed = [row for row in measured if row.noise is not None and row.noise <= style.MOST_NOISE]
    _measured(axes, timed, [curve.planner for curve in curves], scale)
    for number, nbytes in enumerate(budgets):
        label = f"budget {size(nbytes)}" if len(budgets) == 1 else "" if number else "budgets"
        axes.axvline(nbytes / scale, color=style.BUDGET, lw=1.2, ls=_DASHES, label=label)
    axes.margins(x=0.06, y=0.12)
    label_axes(axes, f"peak memory ({unit})", "time added (% of the baseline)")
    legend(axes, columns=3)
    return figure


def _curve(axes: "Axes", curve: PlannerCurve, number: int, *, scale: int, step_seconds: float) -> None:
    ordered = sorted(curve.points, key=lambda point: (point.peak_bytes, point.recompute_seconds))
    colour, mark = COLOURS[number % len(COLOURS)], MARKS[number % len(MARKS)]
    axes.plot(
        [point.peak_bytes / scale for point in ordered],
        [100 * point.recompute_seconds / step_seconds if step_seconds else 0.0 for point in ordered],
        f"-{mark}", color=colour, markersize=4, lw=1.5, label=f"{curve.planner} (simulated)",
    )  # fmt: skip
    shown = [place for place in map(style.measured_place, ordered) if place is not None]
    if shown:
        axes.plot(
            [peak_bytes / scale for peak_bytes, _ in shown],
            [100 * overhead for _, overhead in shown],
            mark, color=colour, markersize=9, markerfacecolor="none", markeredgewidth=1.6,
            label=f"{curve.planner} (measured)",
        )  # fmt: skip


def _bound(axes: "Axes", curves: Sequence[PlannerCurve], *, scale: int, step_seconds: float) -> None:
    """The best bound known at each peak: a bound at a larger peak holds at a smaller one, too. Between two
    peaks, that of the larger."""
    known = sorted(
        (point.peak_bytes, point.lower_bound_seconds)
        for curve in curves
        for point in curve.points
        if point.lower_bound_seconds is not None
    )
    if not known or not step_seconds:
        return
    least: list[tuple[int, float]] = []
    best = 0.0
    for peak_bytes, seconds in reversed(known):
        best = max(best, seconds or 0.0)
        least.append((peak_bytes, best))
    x = [peak_bytes / scale for peak_bytes, _ in reversed(least)]
    y = [100 * seconds / step_seconds for _, seconds in reversed(least)]
    axes.fill_between(x, 0, y, step="pre", color=INK, alpha=0.08, lw=0)
    axes.plot(x, y, color=INK, lw=1.2, ls=":", drawstyle="steps-pre", label="no plan is below (proven)")


def _measured(axes: "Axes", rows: Sequence[CompareRow], planners: Sequence[str], scale: int) -> None:
    """Measured methods: a planner's plans in the colour of its curve, others with their names beside."""
    named: set[str] = set()
    for row in rows:
        if row.peak_bytes is None or row.time_ratio is None or row.noise is None:
            continue
        name = row.method.partition(" ≤")[0]
        place = row.peak_bytes / scale, 100 * (row.time_ratio - 1)
        own = COLOURS[planners.index(name) % len(COLOURS)] if name in planners else INK
        axes.errorbar(
            *place, yerr=100 * row.noise, fmt="*", color=own if row.exact else style.BEFORE, markersize=10,
            capsize=3, elinewidth=1, alpha=1.0 if row.exact else 0.5,
            label=f"{name} (measured)" if name in planners and name not in named else "",
        )  # fmt: skip
        named.add(name)
        if name not in planners or not row.exact:
            words = row.method if row.exact else f"{row.method} ({row.verdict})"
            write_beside(axes, words, place, INK, xytext=(6, 5), ha="left")
