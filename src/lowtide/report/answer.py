"""The first lines of the page: whether the plan fits, what it saves and costs, whether it is exact.

A measured figure takes precedence over a simulated one. Every figure says which of the two it is.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.errors import BudgetTooSmall
from lowtide.facts import Action, Solution
from lowtide.facts.levers import as_typed
from lowtide.report.resting import hidden_text, resting_text, traffic_text
from lowtide.report.results import CompareRow, Measurement, Results, SweepRow, SweepStatus, TradeoffPoint
from lowtide.report.style import (
    NOT_BY_RECOMPUTING,
    added,
    duration,
    how_good,
    is_noisy,
    is_too_noisy,
    percent,
    size,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`tone` is "good", "bad" or "warn"."""

    tone: str
    headline: str
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    label: str
    value: str
    note: str = ""
    tone: str = ""


def unfinished_verdict(missing: str) -> Verdict:
    why = "The command is still running, or was stopped before its end."
    return Verdict(tone="warn", headline=f"Unfinished: {missing}", why=why)


def refused_verdict(error: BudgetTooSmall) -> Verdict:
    """The budget was refused: the lowest reachable peak, and what sets it."""
    headline = (
        f"Does not fit: {size(error.floor_bytes)} at the least, for a budget of {size(error.budget_bytes)}"
    )
    return Verdict(tone="bad", headline=headline, why=str(error))


def lever_rows(error: BudgetTooSmall) -> list[tuple[str, str, str]]:
    """Of each lever: the options to add, the lowest reachable peak with it, and whether that fits."""
    return [
        (" ".join(as_typed(lever)), lever.floor, "yes" if lever.floor_bytes <= error.budget_bytes else "no")
        for lever in error.levers
    ]


def plan_verdict(solution: Solution, measurement: Measurement | None) -> Verdict:
    peak, measured, budget_bytes = _against_budget(solution, measurement)
    basis = "simulated" if measured is None else "measured"
    budget = size(budget_bytes)
    if measurement and measurement.exact is False:
        return Verdict(
            tone="bad",
            headline="Results differ from the baseline",
            why=f"{len(measurement.differences)} differences: {_blame(measurement)}. "
            f"Peak {size(peak)} ({basis}) for a budget of {budget}.",
        )
    if peak > budget_bytes:
        return Verdict(
            tone="bad",
            headline=f"Does not fit: {size(peak)} for a budget of {budget}",
            why=f"The {basis} peak is {size(peak - budget_bytes)} over the budget." + _lowest(solution),
        )
    spare = size(budget_bytes - peak)
    if measured is None:
        return Verdict(
            tone="warn",
            headline=f"Should fit: {size(peak)} simulated for a budget of {budget}",
            why=f"{spare} to spare. Not measured yet: lowtide verify runs it and compares.",
        )
    return Verdict(
        tone="good",
        headline=f"Fits: {size(peak)} of a {budget} budget",
        why=f"Measured over a whole step, {spare} to spare.",
    )


def _against_budget(solution: Solution, measurement: Measurement | None) -> tuple[int, int | None, int]:
    """The bytes to compare with the budget, whether they are measured, and the budget: live or reserved."""
    planned, reserved = measurement.planned if measurement else None, solution.reserved
    if reserved is not None and reserved.budget_bytes is not None:
        measured = planned.reserved_peak_bytes if planned else None
        return (reserved.most_bytes if measured is None else measured), measured, reserved.budget_bytes
    measured = planned.measured_peak_bytes if planned else None
    return (solution.peak_bytes if measured is None else measured), measured, solution.budget_bytes


def _lowest(solution: Solution) -> str:
    if solution.floor_bytes is None:
        return ""
    proven = ", proven" if solution.is_floor_proven else ""
    return f" The lowest reachable peak is {size(solution.floor_bytes)} (simulated{proven})."


def _blame(measurement: Measurement) -> str:
    return NOT_BY_RECOMPUTING if measurement.recompute_exact else "do not train with this plan"


def plan_tiles(solution: Solution, measurement: Measurement | None) -> list[Tile]:
    before, after = solution.baseline_peak_bytes, solution.peak_bytes
    basis = "simulated"
    if measurement:
        measured = (measurement.baseline.measured_peak_bytes, measurement.planned.measured_peak_bytes)
        if measured[0] is not None and measured[1] is not None:
            before, after, basis = measured[0], measured[1], "measured"
    again = [d for d in solution.decisions if d.action is Action.RECOMPUTE]
    tiles = [
        Tile(
            label="Peak memory",
            value=size(after),
            note=f"{basis}; baseline {size(before)}",
        ),
        Tile(
            label="Saved",
            value=size(before - after),
            note=f"{percent(after / before - 1) if before else ''} of the peak, {basis}",
        ),
        _time_added(solution, measurement),
        Tile(
            label="Recomputed",
            value=f"{len(again)} of {len(solution.decisions)}",
            note=f"activations, {size(sum(d.nbytes for d in again))}, "
            f"in {duration(solution.recompute_seconds - _stalls(solution))}, {how_good(solution.gap)}",
        ),
    ]
    return [*tiles, *_offloaded(solution), *_resting(solution), _exactness(measurement)]


FREE = 0.001
"""The share of a step's time below which nobody sees a difference."""


def free_peak(points: Sequence[TradeoffPoint], step_seconds: float) -> int | None:
    """The lowest peak of a plan that adds next to no time; None without such a plan."""
    peaks = [point.peak_bytes for point in points if point.recompute_seconds <= FREE * step_seconds]
    return min(peaks, default=None)


def free_text(
    points: Sequence[TradeoffPoint], step_seconds: float, *, baseline_bytes: int | None = None
) -> str:
    """`100.8 → 81.5 MiB for free`, where the lowest such peak is below the baseline's (else the curve's)."""
    lowest = free_peak(points, step_seconds)
    baseline = baseline_bytes or max((point.peak_bytes for point in points), default=0)
    if lowest is None or size(lowest) == size(baseline) or lowest > baseline:
        return ""
    before, unit = size(baseline).rsplit(" ", 1)
    after = size(lowest)
    before = before if after.endswith(f" {unit}") else f"{before} {unit}"
    return f"{before} → {after} for free: that plan adds less than {100 * FREE:.1f} % to the step (simulated)"


def _stalls(solution: Solution) -> float:
    offload = solution.offload
    return offload.stall_seconds + offload.slowed_seconds if offload else 0.0


def _offloaded(solution: Solution) -> list[Tile]:
    offload = solution.offload
    if offload is None or not offload.store_bytes:
        return []
    away = [d for d in solution.decisions if d.action is Action.OFFLOAD]
    if not away and solution.resting:
        return []
    away_bytes = offload.store_bytes - offload.resting_bytes
    hidden = 1 - offload.stall_seconds / offload.transfer_seconds if offload.transfer_seconds else 1.0
    return [
        Tile(
            label="Offloaded",
            value=f"{len(away)} of {len(solution.decisions)}",
            note=f"activations, {size(away_bytes)} to {offload.transfer_speed.store} and back in "
            f"{duration(offload.transfer_seconds)}, {100 * max(0.0, hidden):.0f} % of it hidden behind the "
            "compute (simulated)",
        )
    ]


def _resting(solution: Solution) -> list[Tile]:
    """What is on the store between the steps too."""
    if not solution.resting or solution.offload is None:
        return []
    parts = (resting_text(solution), traffic_text(solution), hidden_text(solution))
    return [
        Tile(
            label="On the store all along",
            value=size(solution.offload.resting_bytes),
            note=", ".join(filter(None, parts)),
        )
    ]


def _time_added(solution: Solution, measurement: Measurement | None) -> Tile:
    simulated = percent(solution.overhead)
    if measurement is None or measurement.overhead is None:
        return Tile(label="Time added", value=simulated, note="simulated, recompute over the baseline")
    if is_too_noisy(measurement.overhead, measurement.noise):
        value = added(measurement.overhead, measurement.noise)
        note = f"simulated; the machine was too busy to measure it: {value}"
        return Tile(label="Time added", value=simulated, note=note, tone="warn")
    noise = "" if measurement.noise is None else f" ± {100 * measurement.noise:.1f} points"
    note = f"measured{noise}; {simulated} simulated"
    return Tile(label="Time added", value=percent(measurement.overhead), note=note)


def _exactness(measurement: Measurement | None) -> Tile:
    if measurement is not None and measurement.exact is None and measurement.rounding:
        return Tile(label="Results", value="not exact: rounds", note=measurement.rounding, tone="warn")
    if measurement is None or measurement.exact is None:
        return Tile(label="Results", value="not compared", note="lowtide verify compares", tone="warn")
    if measurement.exact and measurement.eager_differences:
        note = "as far as eager equals itself; the notes name the ops"
        return Tile(label="Results", value="exact", note=note, tone="warn")
    if measurement.exact:
        return Tile(label="Results", value="exact", note="equal to eager to the last bit", tone="good")
    if measurement.recompute_exact:
        return Tile(
            label="Results", value="differ", note=f"{Results.UNLIKE_EAGER}; listed below", tone="warn"
        )
    return Tile(label="Results", value="differ", note="listed below", tone="bad")


_CAVEATS = {
    SweepStatus.TOO_SMALL: "have no plan for their budget",
    SweepStatus.PLAN_MEASURED: "ran with the plan only, and were not compared",
    SweepStatus.PREDICTED: "are simulated only",
    SweepStatus.FAILED: "failed",
}


def sweep_verdict(rows: Sequence[SweepRow]) -> Verdict:
    """The largest batch size that fits, without and with the plan. For budgets that are a share of each
    size's own peak, the number of sizes that fit with the plan.
    """
    wrong = [row.batch_size for row in rows if row.exact is False]
    if wrong:
        return Verdict(tone="bad", headline=f"Results differ at batch size {', '.join(map(str, wrong))}")
    without, fitting = ([row for row in rows if _within(row.peaks[i], row.budget_bytes)] for i in (0, 1))
    counts = Counter(row.status for row in rows)
    caveats = [
        f"{counts[status]} of {len(rows)} sizes {words}."
        for status, words in _CAVEATS.items()
        if counts[status]
    ]
    if not fitting:
        return Verdict(tone="bad", headline="No batch size fits the budget", why=" ".join(caveats))
    budgets = {row.budget_bytes for row in rows} - {None}
    return Verdict(
        tone="warn" if caveats else "good",
        headline=f"{len(fitting)} of {len(rows)} batch sizes fit their own budget with the plan"
        if len(budgets) > 1
        else _one_budget(without, fitting),
        why=" ".join(caveats) or "Every size measured.",
    )


def _one_budget(without: Sequence[SweepRow], fitting: Sequence[SweepRow]) -> str:
    largest = max(fitting, key=lambda row: row.batch_size)
    baseline = f"{max(row.batch_size for row in without)} without" if without else "none fits without"
    budget = f" (budget {size(largest.budget_bytes)})" if largest.budget_bytes is not None else ""
    return f"Fits up to batch size {largest.batch_size} with the plan, {baseline}{budget}"


def _within(peak_bytes: int | None, budget_bytes: int | None) -> bool:
    return peak_bytes is not None and (budget_bytes is None or peak_bytes <= budget_bytes)


_OTHERS = {
    Results.CRASHED: "crashed",
    Results.NOT_APPLICABLE: "not applicable",
    Results.NOT_REACHED: "below what it reaches",
    Results.ROUNDED: "rounds differently",
    Results.UNLIKE_EAGER: "unlike eager, but not by recompute",
}
"""Verdicts besides exact and wrong, in the order to say them."""


def compare_verdict(rows: Sequence[CompareRow]) -> Verdict:
    """Wrong results first; then the method with the lowest peak among those that are exact. A time only where
    its noise is known and smaller."""
    wrong = [row.method for row in rows if row.verdict is Results.WRONG]
    others = [
        f"{words}: {', '.join(row.method for row in rows if row.verdict is verdict)}"
        for verdict, words in _OTHERS.items()
        if any(row.verdict is verdict for row in rows)
    ]
    why = f"{'; '.join(others)}." if others else ""
    alarm = f"Wrong results, without an error: {', '.join(wrong)}. " if wrong else ""
    exact = [row for row in rows if row.exact and row.peak_bytes is not None]
    if not exact:
        return Verdict(tone="bad", headline=f"{alarm}No method gave exact results", why=why)
    best = min(exact, key=lambda row: (row.peak_bytes or 0, row.time_ratio or 0.0, row.method))
    return Verdict(
        tone="warn" if wrong else "good",
        headline=f"{alarm}Lowest exact peak: {size(best.peak_bytes)} with {best.method}{_at_time(best)}",
        why=(why[:1].upper() + why[1:]) or ("" if wrong else "All are exact."),
    )


def _at_time(row: CompareRow) -> str:
    """Words about a time that can be claimed."""
    if row.time_ratio is None or row.noise is None or is_noisy(row.time_ratio - 1, row.noise):
        return ""
    return f" at {row.time_ratio:.2f} times the time"
