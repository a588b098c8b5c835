"""Static plots, PNG and SVG: `write_plots` makes all that a command's data allow."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from lowtide.facts import Activation, Step
from lowtide.planning.simulate import Timeline
from lowtide.report.experiment_plots import (
    plot_latency_by_batch_size,
    plot_methods,
    plot_peak_by_batch_size,
    plot_tradeoff,
)
from lowtide.report.pareto_plot import plot_pareto
from lowtide.report.results import CompareRow, PlannerCurve, SweepRow, TradeoffPoint
from lowtide.report.step_plots import (
    plot_activation_sizes,
    plot_before_after,
    plot_memory_by_rank,
    plot_node_memory,
    plot_node_seconds,
    plot_peak_breakdown,
    plot_transfers,
)
from lowtide.report.style import name_figure, save_figure
from lowtide.report.times import store_use


def write_plots(
    folder: Path,
    *,
    step: Step | None = None,
    before: Timeline | None = None,
    after: Timeline | None = None,
    activations: Sequence[Activation] = (),
    budget_bytes: int | None = None,
    tradeoff: Sequence[TradeoffPoint] = (),
    without_offload: Sequence[TradeoffPoint] = (),
    step_seconds: float | None = None,
    sweep: Sequence[SweepRow] = (),
    compare: Sequence[CompareRow] = (),
    planners: Sequence[PlannerCurve] = (),
    budgets: Sequence[int] = (),
    name: str = "",
    formats: Iterable[str] = ("png", "svg"),
) -> list[Path]:
    """Write every plot that the arguments allow into `folder`; returns the files, in order.

    `name` is the title: model and batch. `planners` are curves to draw in one plot, with the measured methods
    of `compare` and the `budgets`.
    LowtideError where matplotlib is not installed.
    """
    figures = {}
    if step is not None:
        figures["node_run_time"] = plot_node_seconds(step)
    if step is not None and before is not None:
        figures["node_peak_memory"] = plot_node_memory(step, before)
        figures["memory_by_rank"] = plot_memory_by_rank(step, before)
        figures["peak_breakdown"] = plot_peak_breakdown(before, after)
        if after is not None:
            figures["timeline_before_after"] = plot_before_after(
                step, before, after, budget_bytes=budget_bytes
            )
            use = store_use(step, after)
            if use is not None:
                figures["transfers"] = plot_transfers(use)
    if activations:
        figures["activation_sizes"] = plot_activation_sizes(activations)
    if tradeoff:
        baseline_seconds = step_seconds or (before.seconds if before is not None else 0.0)
        figures["tradeoff"] = plot_tradeoff(
            tradeoff,
            step_seconds=baseline_seconds,
            budget_bytes=budget_bytes,
            without_offload=without_offload,
        )
    if sweep:
        figures["peak_by_batch_size"] = plot_peak_by_batch_size(sweep)
        figures["latency_by_batch_size"] = plot_latency_by_batch_size(sweep)
    if any(row.peak_bytes is not None for row in compare):
        figures["methods"] = plot_methods(compare)
    if planners:
        seconds = step_seconds or (before.seconds if before is not None else 0.0)
        figures["pareto"] = plot_pareto(planners, step_seconds=seconds, measured=compare, budgets=budgets)
    if name:
        for figure in figures.values():
            name_figure(figure, name)
    chosen = tuple(formats)
    return [
        path
        for name, figure in figures.items()
        for path in save_figure(figure, folder / name, formats=chosen)
    ]
