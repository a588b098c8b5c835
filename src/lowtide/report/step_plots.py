"""Plots of one step: its nodes, its activations and its memory, as profiled and simulated."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from lowtide.facts import Activation, Region, Step
from lowtide.planning.simulate import Timeline
from lowtide.report import style
from lowtide.report.exports import active_bytes
from lowtide.report.style import (
    INK,
    MUTED,
    byte_unit,
    duration,
    label_axes,
    legend,
    new_figure,
    new_panels,
    size,
    time_unit,
    write_beside,
)
from lowtide.report.times import READ, WRITE, StoreUse, run_starts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_node_seconds(step: Step) -> "Figure":
    """Run time of every node, coloured by region."""
    figure, axes = new_figure("Run time of each op (profiled)")
    unit, scale = time_unit(max((node.seconds for node in step.nodes), default=0.0))
    for region in Region:
        nodes = [node for node in step.nodes if node.region is region and node.seconds > 0]
        ranks = [node.rank for node in nodes]
        seconds = [node.seconds / scale for node in nodes]
        colour = style.REGION_COLOURS[region]
        axes.vlines(ranks, 0, seconds, colors=colour, lw=0.8, alpha=0.6, rasterized=_is_dense(step.nodes))
        axes.plot(
            ranks, seconds, "o", markersize=2.5, color=colour, label=str(region),
            rasterized=_is_dense(step.nodes),
        )  # fmt: skip
    _mark_regions(axes, step, range(len(step.nodes)))
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, len(step.nodes))
    label_axes(axes, "rank of the op", f"run time ({unit})")
    legend(axes)
    return figure


def plot_node_memory(step: Step, timeline: Timeline) -> "Figure":
    """Live bytes while each node of the baseline runs, and the node's own: reads, result, workspace."""
    figure, (whole, part) = new_panels("Memory while each op runs (simulated)", (3, 2), height=5.5)
    own = np.array([active_bytes(step, step.nodes[rank]) for rank in timeline.order])
    positions = np.arange(len(timeline.order))
    for axes, live, label, colour in (
        (whole, timeline.live_bytes, "all live", style.AFTER),
        (part, own, "the op's own", style.RECOMPUTE),
    ):
        unit, scale = byte_unit(float(live.max(initial=0)))
        axes.vlines(positions, 0, live / scale, colors=colour, lw=0.6, rasterized=_is_dense(positions))
        axes.set_ylim(bottom=0)
        axes.set_ylabel(f"{label} ({unit})", color=MUTED, fontsize=10)
    _mark_regions(whole, step, timeline.order)
    whole.set_xlim(0, len(timeline.order))
    part.set_xlabel("rank of the op", color=MUTED, fontsize=10)
    return figure


def plot_activation_sizes(activations: Sequence[Activation]) -> "Figure":
    """Activations from the largest to the smallest, and the share of all bytes up to each."""
    figure, axes = new_figure("Activations by size")
    sizes = np.array(sorted((a.nbytes for a in activations), reverse=True), dtype=np.int64)
    unit, scale = byte_unit(float(sizes.max(initial=0)))
    ranks = np.arange(len(sizes))
    axes.fill_between(
        ranks, sizes / scale, step="mid", color=style.COLOURS[style.STACK[-2]], lw=0, label="size"
    )
    label_axes(axes, f"{len(sizes)} activations, largest first", f"size ({unit})")
    share = axes.twinx()
    share.plot(ranks, 100 * sizes.cumsum() / max(1, sizes.sum()), color=style.AFTER, lw=1.6)
    share.set_ylim(0, 104)
    share.set_ylabel(f"share of all {size(int(sizes.sum()))} (%)", color=style.AFTER, fontsize=10)
    share.tick_params(colors=MUTED, labelsize=9)
    share.spines[:].set_visible(False)
    axes.set_ylim(bottom=0)
    return figure


def plot_memory_by_rank(step: Step, timeline: Timeline) -> "Figure":
    """Live bytes at every op, stacked by kind, with the borders of the regions."""
    figure, axes = new_figure("Memory over the step, by kind (simulated)")
    scale = _stack(axes, timeline, np.arange(len(timeline.order) + 1))
    _mark_regions(axes, step, timeline.order)
    _mark_peak(axes, timeline.peak_position, timeline.peak_bytes, scale, INK)
    axes.set_xlabel("ops in the order they run", color=MUTED, fontsize=10)
    legend(axes)
    return figure


def plot_before_after(
    step: Step, before: Timeline, after: Timeline, *, budget_bytes: int | None = None
) -> "Figure":
    """The timeline with the plan by kind, and the baseline's total as a line over it."""
    figure, axes = new_figure("Memory over the step, without and with the plan (simulated)", height=5)
    times_before, times_after = _starts(step, before), _starts(step, after)
    scale = _stack(axes, after, times_after)
    axes.step(
        times_before,
        _closed(before.live_bytes) / scale,
        where="post",
        color=INK,
        lw=1.4,
        label="baseline",
    )
    # a budget far above the peaks would flatten them
    shown = budget_bytes if budget_bytes and budget_bytes <= 2 * before.peak_bytes else None
    if shown is not None:
        _budget_line(axes, shown, scale)
    _mark_regions(axes, step, after.order, times_after)
    _mark_peak(axes, times_before[before.peak_position], before.peak_bytes, scale, INK)
    _mark_peak(axes, times_after[after.peak_position], after.peak_bytes, scale, style.AFTER)
    axes.set_ylim(0, 1.1 * max(before.peak_bytes, after.peak_bytes, shown or 0) / scale)
    axes.set_xlabel("time in the step (s, profiled)", color=MUTED, fontsize=10)
    legend(axes)
    return figure


def plot_transfers(use: StoreUse) -> "Figure":
    """Bytes transferred up to every time point, and stalls of the step."""
    title = f"Bytes to the store and back ({100 * use.hidden_share:.0f} % of the transfer time hidden)"
    figure, axes = new_figure(title)
    unit, scale = byte_unit(max(use.store_bytes, use.read_bytes))
    for direction, points in ((WRITE, use.written), (READ, use.read)):
        seconds, nbytes = zip(*points, strict=True)
        sent = [n / scale for n in nbytes]
        axes.plot(seconds, sent, color=style.DIRECTIONS[direction], lw=1.8, label=direction)
    waits = [move for move in use.moves if move.stall_seconds]
    for number, move in enumerate(waits):
        begin = move.end_seconds - move.stall_seconds
        axes.axvspan(
            begin, move.end_seconds, color=style.RECOMPUTE, alpha=0.25, lw=0,
            label="" if number else f"waiting ({duration(use.stall_seconds)} in all)",
        )  # fmt: skip
    axes.set_xlim(0, use.step_seconds)
    axes.set_ylim(bottom=0)
    label_axes(axes, "time in the step (s, simulated)", f"bytes sent ({unit})")
    legend(axes)
    return figure


def plot_peak_breakdown(before: Timeline, after: Timeline | None = None) -> "Figure":
    """Live bytes at the peak, by kind."""
    runs = [("baseline", before)] + ([("with the plan", after)] if after is not None else [])
    figure, axes = new_figure("Memory at the peak, by kind (simulated)", height=1.9 + 0.6 * len(runs))
    unit, scale = byte_unit(before.peak_bytes)
    left = np.zeros(len(runs))
    places = np.arange(len(runs))[::-1]
    for kind in style.STACK:
        parts = np.array([int(run.bytes_by_kind[kind][run.peak_position]) for _, run in runs])
        if parts.any():
            axes.barh(
                places, parts / scale, left=left, height=0.6, color=style.COLOURS[kind],
                label=f"{style.LABELS[kind]} ({', '.join(size(int(part)) for part in parts)})",
            )  # fmt: skip
        left += parts / scale
    for place, (_, run), end in zip(places, runs, left, strict=True):
        axes.annotate(
            size(run.peak_bytes),
            (end, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=INK,
        )
    axes.set_yticks(places, [name for name, _ in runs], color=INK)
    axes.grid(visible=False)
    axes.set_xlim(0, 1.15 * left.max())
    axes.set_xlabel(f"bytes at the peak ({unit})", color=MUTED, fontsize=10)
    legend(axes, columns=3)
    return figure


def _stack(axes: "Axes", timeline: Timeline, places: np.ndarray) -> int:
    """Draw the kinds as areas; returns the bytes of the unit used."""
    unit, scale = byte_unit(timeline.peak_bytes)
    bottom = np.zeros(len(places))
    for kind in style.STACK:
        live = _closed(timeline.bytes_by_kind[kind]) / scale
        if live.any():
            axes.fill_between(
                places, bottom, bottom + live, step="post", lw=0, rasterized=_is_dense(places),
                color=style.COLOURS[kind], label=style.LABELS[kind],
            )  # fmt: skip
        bottom = bottom + live
    axes.set_ylim(0, 1.1 * timeline.peak_bytes / scale)
    axes.set_xlim(places[0], places[-1])
    axes.set_ylabel(f"live bytes ({unit})", color=MUTED, fontsize=10)
    return scale


def _is_dense(values: Sequence[object] | np.ndarray) -> bool:
    """More shapes than pixels: an SVG has them as an image; text and lines stay vectors."""
    return len(values) > 1500


def _closed(values: np.ndarray) -> np.ndarray:
    """A value per run, and the last value again, for the end of the last run."""
    return np.append(values, values[-1:])


def _starts(step: Step, timeline: Timeline) -> np.ndarray:
    """When every run starts, and when the last one ends."""
    return np.array(run_starts(step, timeline))


def _mark_regions(
    axes: "Axes", step: Step, order: Sequence[int], places: Sequence[float] | np.ndarray | None = None
) -> None:
    """A border where each region first runs, and its name above the plot."""
    for region in Region:
        first = next((i for i, rank in enumerate(order) if step.nodes[rank].region is region), None)
        if first is None:
            continue
        place = first if places is None else places[first]
        if first:
            axes.axvline(place, color=MUTED, lw=0.9, ls=(0, (5, 4)))
        axes.annotate(
            str(region), (place, 1), xycoords=("data", "axes fraction"), xytext=(3, 3),
            textcoords="offset points", fontsize=9, color=MUTED,
        )  # fmt: skip


def _mark_peak(axes: "Axes", place: float, peak_bytes: int, scale: int, colour: str) -> None:
    axes.plot(
        [place], [peak_bytes / scale], "o", color=colour, markeredgecolor="white", markersize=7, zorder=5
    )
    write_beside(axes, size(peak_bytes), (place, peak_bytes / scale), colour, xytext=(7, 4))


def _budget_line(axes: "Axes", budget_bytes: int, scale: int) -> None:
    axes.axhline(
        budget_bytes / scale,
        color=style.BUDGET,
        lw=1.2,
        ls=(0, (5, 3)),
        label=f"budget {size(budget_bytes)}",
    )
