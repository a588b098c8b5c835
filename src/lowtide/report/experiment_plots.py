"""Plots of experiments: batch sizes, methods and the trade-off curve. Simulated bars are hatched."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lowtide.report import style
from lowtide.report.results import CompareRow, SweepRow, SweepStatus, TradeoffPoint
from lowtide.report.style import (
    INK,
    MUTED,
    added,
    byte_unit,
    label_axes,
    legend,
    new_figure,
    percent,
    size,
    time_unit,
    write_beside,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 0.38
_DASHES = (0, (5, 3))


def plot_peak_by_batch_size(rows: Sequence[SweepRow]) -> "Figure":
    """Peak without and with the plan per batch size, the reduction above the bars, and the budget."""
    figure, axes = new_figure("Peak memory against batch size")
    heights = [(row.baseline.peak_bytes, row.planned.peak_bytes, row.budget_bytes) for row in rows]
    largest = max((height or 0 for row in heights for height in row), default=0)
    unit, scale = byte_unit(largest)
    for column, (label, colour) in enumerate((("baseline", style.BEFORE), ("with the plan", style.AFTER))):
        for measured in (True, False):
            found = [
                (index, peak / scale)
                for index, row in enumerate(rows)
                if (step := (row.baseline, row.planned)[column]).is_measured is measured
                and (peak := step.peak_bytes) is not None
            ]
            if found:
                axes.bar(
                    [index + (column - 0.5) * _WIDTH for index, _ in found],
                    [height for _, height in found],
                    _WIDTH * 0.94,
                    color=colour,
                    hatch=None if measured else "///",
                    edgecolor="white",
                    linewidth=0,
                    label=label if measured else f"{label} (simulated)",
                )
    for index, row in enumerate(rows):
        after = row.planned.peak_bytes
        if row.reduction is not None and after is not None:
            # from the bar's left edge, clear of the higher bar beside it
            _above(axes, (index + 0.02, after / scale), percent(-row.reduction), ha="left", xytext=(0, 3))
    _budgets(axes, rows, scale)
    _batch_axis(axes, rows)
    axes.set_ylim(0, 1.12 * largest / scale if largest else 1)
    label_axes(axes, "batch size", f"peak memory ({unit})")
    legend(axes)
    return figure


def plot_latency_by_batch_size(rows: Sequence[SweepRow]) -> "Figure":
    """Measured median step time without and with the plan as lines, with the spread and the overhead."""
    figure, axes = new_figure("Step time against batch size (measured median ± half the quartiles' distance)")
    timed = [row for row in rows if row.planned.seconds_median or row.baseline.seconds_median]
    tops = [
        (step.seconds_median or 0.0) + (step.seconds_spread or 0.0) / 2
        for row in timed
        for step in (row.baseline, row.planned)
    ]
    largest = max(tops, default=0.0)
    unit, scale = time_unit(largest)
    for column, (label, colour) in enumerate((("baseline", style.BEFORE), ("with the plan", style.AFTER))):
        runs = [
            (index, step.seconds_median, step.seconds_spread or 0.0)
            for index, row in enumerate(timed)
            if (step := (row.baseline, row.planned)[column]).seconds_median is not None
        ]
        if runs:
            axes.errorbar(
                [index for index, _, _ in runs],
                [seconds / scale for _, seconds, _ in runs],
                yerr=[spread / 2 / scale for _, _, spread in runs],
                fmt="-o",
                color=colour,
                ecolor=INK,
                elinewidth=1,
                capsize=3,
                markersize=5,
                lw=1.8,
                label=label,
            )
    for index, row in enumerate(timed):
        if row.overhead is not None:
            top = max(tops[2 * index : 2 * index + 2]) / scale
            # on the left: lines rise to the right
            text = added(row.overhead, row.noise).replace(" (", "\n(")
            _above(axes, (index, top), text, ha="right", xytext=(-3, 4))
    _batch_axis(axes, timed)
    axes.set_ylim(0, 1.2 * largest / scale if largest else 1)
    label_axes(axes, "batch size", f"step time ({unit})")
    if timed:
        legend(axes)
    return figure


def plot_methods(rows: Sequence[CompareRow]) -> "Figure":
    """Peak and time of every method that ran; methods that are not exact are grey."""
    ran = [row for row in rows if row.peak_bytes is not None]
    title = "Peak memory and time of each method (grey: not eager's results)"
    figure, axes = new_figure(title, height=1.8 + 0.5 * len(ran))
    unit, scale = byte_unit(max((row.peak_bytes or 0 for row in ran), default=0))
    peaks = [(row.peak_bytes or 0) / scale for row in ran]
    axes.barh(
        range(len(ran)),
        peaks,
        height=0.62,
        color=[style.AFTER if row.exact else style.BEFORE for row in ran],
    )
    for index, (row, peak) in enumerate(zip(ran, peaks, strict=True)):
        ratio = f", × {row.time_ratio:.2f}" if row.time_ratio is not None else ""
        words = f" {size(row.peak_bytes)}{ratio}" + ("" if row.exact else f" ({row.verdict})")
        axes.text(peak, index, words, va="center", fontsize=9, color=INK)
    axes.set_yticks(range(len(ran)), [row.method for row in ran])
    axes.set_ylim(len(ran) - 0.4, -0.6)  # the first on top
    axes.set_xlim(0, 1.5 * max(peaks, default=1))
    axes.grid(visible=False)
    label_axes(axes, f"peak memory ({unit})", "")
    return figure


def plot_tradeoff(
    points: Sequence[TradeoffPoint],
    *,
    step_seconds: float,
    budget_bytes: int | None = None,
    without_offload: Sequence[TradeoffPoint] = (),
) -> "Figure":
    """Recompute time against peak: the simulated curve, the band down to the proven bound, measured points.

    `without_offload` is the curve of the same step without its store.
    """
    figure, axes = new_figure("Time added against peak memory")
    ordered = sorted(points, key=lambda point: (point.peak_bytes, point.recompute_seconds))
    unit, scale = byte_unit(ordered[-1].peak_bytes if ordered else 0)
    overheads = [100 * point.recompute_seconds / step_seconds if step_seconds else 0.0 for point in ordered]
    axes.plot(
        [point.peak_bytes / scale for point in ordered], overheads, "-o", color=style.AFTER, markersize=4,
        lw=1.6, label="with offload (simulated)" if without_offload else "simulated",
    )  # fmt: skip
    if without_offload and step_seconds:
        others = sorted(without_offload, key=lambda point: (point.peak_bytes, point.recompute_seconds))
        axes.plot(
            [point.peak_bytes / scale for point in others],
            [100 * point.recompute_seconds / step_seconds for point in others],
            "-o", color=style.RECOMPUTE, markersize=4, lw=1.6, label="without offload (simulated)",
        )  # fmt: skip
    bounds = [point.lower_bound_seconds for point in ordered]
    if step_seconds and all(bound is not None for bound in bounds):
        least = [100 * (bound or 0.0) / step_seconds for bound in bounds]
        axes.fill_between(
            [point.peak_bytes / scale for point in ordered], least, overheads, color=style.AFTER,
            alpha=0.15, lw=0, label="no plan is below this band (proven)",
        )  # fmt: skip
    measured = [
        (place[0] / scale, 100 * place[1])
        for place in map(style.measured_place, ordered)
        if place is not None
    ]
    if measured:
        x, y = zip(*measured, strict=True)
        axes.plot(
            x, y, "o", markersize=8, markerfacecolor="none", markeredgecolor=INK, markeredgewidth=1.6,
            label="measured",
        )  # fmt: skip
    if budget_bytes is not None:
        axes.axvline(
            budget_bytes / scale,
            color=style.BUDGET,
            lw=1.2,
            ls=_DASHES,
            label=f"budget {size(budget_bytes)}",
        )
    label_axes(axes, f"peak memory ({unit})", "time added (% of the baseline)")
    legend(axes)
    return figure


def _above(axes: "Axes", place: tuple[float, float], text: str, *, ha: str, xytext: tuple[int, int]) -> None:
    write_beside(axes, text, place, style.AFTER, xytext=xytext, ha=ha)


def _budgets(axes: "Axes", rows: Sequence[SweepRow], scale: int) -> None:
    """One line for a common budget, else a mark over each batch size."""
    budgets = {row.budget_bytes for row in rows if row.budget_bytes is not None}
    if len(budgets) == 1:
        nbytes = budgets.pop()
        axes.axhline(nbytes / scale, color=style.BUDGET, lw=1.4, ls=_DASHES, label=f"budget {size(nbytes)}")
        return
    for index, row in enumerate(rows):
        if row.budget_bytes is not None:
            axes.hlines(
                row.budget_bytes / scale, index - 0.45, index + 0.45, color=style.BUDGET, lw=1.4,
                ls=_DASHES, label="" if index else "budget",
            )  # fmt: skip


def _batch_axis(axes: "Axes", rows: Sequence[SweepRow]) -> None:
    axes.set_xticks(range(len(rows)), [_batch_label(row) for row in rows], color=MUTED)
    axes.set_xlim(-0.6, len(rows) - 0.4)


def _batch_label(row: SweepRow) -> str:
    """The batch size, and the reason for a missing bar of the plan."""
    marks = {SweepStatus.FAILED: "failed", SweepStatus.TOO_SMALL: "no plan fits"}
    return f"{row.batch_size}\n{marks[row.status]}" if row.status in marks else str(row.batch_size)
