"""Batch sizes side by side: peak and latency without and with a plan, for one budget."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import Any

from lowtide import api
from lowtide.errors import BudgetTooSmall, LowtideError
from lowtide.experiments.machine import why_not
from lowtide.experiments.measured import run_plain, run_plan
from lowtide.facts.sizes import is_auto, step_budget
from lowtide.profiles import Profile, auto_budget_of
from lowtide.report.results import StepMeasurement, SweepRow, SweepStatus
from lowtide.report.style import size
from lowtide.stage_log import say
from lowtide.zoo.targets import TargetSpec

FINAL = (SweepStatus.MEASURED, SweepStatus.PLAN_MEASURED, SweepStatus.TOO_SMALL)
"""A size with one of these is not run again; a failed size is."""

logger = logging.getLogger("lowtide")

Profiler = Callable[[TargetSpec], Profile]


def sweep(
    source: TargetSpec,
    *,
    batch_sizes: Sequence[int],
    budget: str,
    planner: str = "auto",
    timed_runs: int = 5,
    measure: bool = True,
    done: Sequence[SweepRow] = (),
    profile: Profiler | None = None,
    working: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    tell: Callable[[str], None] = say,
) -> Iterator[SweepRow]:
    """Rows in the order of `batch_sizes`; sizes in `done` are not run again.

    Where this machine has memory for the planned step but not for the baseline, the planned step is measured
    alone and not compared. A size that does not fit, and every size without `measure`, is predicted only.
    Where no plan meets the budget, the baseline is measured alone. A failed size gives a row with the error.
    The budget `auto` is what the device has free at the first size, and `tell` gets its sum. `working(text)`
    is open during long work.
    """
    known = {row.batch_size: row for row in done}
    for batch_size in batch_sizes:
        if batch_size in known:
            yield known[batch_size]
            continue
        spec = replace(source, batch_size=batch_size)
        try:
            found = (profile or profile_spec)(spec)
            if is_auto(budget):
                auto = auto_budget_of(found)
                tell(auto.line)
                budget = auto.text(budget)
            with working(f"batch {batch_size}: planning and verifying"):
                row = row_of(
                    spec, found, budget=budget, planner=planner, timed_runs=timed_runs, measure=measure
                )
        except Exception as error:  # a user's model may raise anything: the other sizes still run
            logger.debug("batch %s failed", batch_size, exc_info=error)
            row = _failed(batch_size, error)
        yield row


def profile_spec(spec: TargetSpec) -> Profile:
    target = spec.load()
    found = api.profile(target.model, target.batch, optimizer=target.optimizer, loss=target.loss)
    return replace(found, lever_search=None)  # a row that does not fit names no levers


def row_of(
    spec: TargetSpec, profile: Profile, *, budget: str, planner: str, timed_runs: int, measure: bool
) -> SweepRow:
    """Plan one batch size, and measure it where it fits."""
    peak_bytes = profile.peak_bytes
    row = SweepRow(
        batch_size=spec.batch_size,
        budget_bytes=step_budget(budget, whole=peak_bytes),
        baseline=StepMeasurement(predicted_peak_bytes=peak_bytes),
        planned=StepMeasurement(),
        status=SweepStatus.PREDICTED,
    )
    try:
        plan = profile.plan(budget, planner)
    except BudgetTooSmall as error:
        why = f"lowest reachable peak {size(error.floor_bytes)}"
        row = replace(row, status=SweepStatus.TOO_SMALL, why=why)
        if not measure or why_not(profile.step, peak_bytes=peak_bytes):
            return row
        return replace(row, baseline=run_plain(spec, predicted=peak_bytes, timed_runs=timed_runs))
    row = replace(
        row,
        planned=StepMeasurement(predicted_peak_bytes=plan.peak_bytes),
        predicted_overhead=plan.overhead,
    )
    if not measure:
        return row
    outcome = run_plan(spec, plan, timed_runs=timed_runs, resident=False)
    found = outcome.measurement
    status = SweepStatus.MEASURED
    if outcome.verification is None and found.planned.is_measured:
        logger.warning("batch %s runs only with its plan: without one it %s", spec.batch_size, outcome.reason)
        status = SweepStatus.PLAN_MEASURED
    elif outcome.verification is None:
        logger.warning(
            "batch %s is predicted only: the step without a plan %s", spec.batch_size, outcome.reason
        )
        status = SweepStatus.PREDICTED
    return replace(
        row,
        baseline=found.baseline,
        planned=found.planned,
        noise=found.noise,
        exact=found.exact,
        recompute_exact=found.recompute_exact,
        status=status,
    )


def _failed(batch_size: int, error: Exception) -> SweepRow:
    text = " ".join(str(error).split())
    if not isinstance(error, LowtideError):
        text = f"{type(error).__name__}: {text}"
    return SweepRow(
        batch_size=batch_size,
        budget_bytes=None,
        baseline=StepMeasurement(),
        planned=StepMeasurement(),
        status=SweepStatus.FAILED,
        why=text,
    )


def is_final(row: SweepRow) -> bool:
    return row.status in FINAL


def row_to_dict(row: SweepRow) -> dict[str, Any]:
    return asdict(row) | {"reduction": row.reduction, "overhead": row.overhead}


def row_from_dict(data: dict[str, Any]) -> SweepRow:
    """A row as `row_to_dict` wrote it; LowtideError for anything else."""
    try:
        fields = {key: value for key, value in data.items() if key not in ("reduction", "overhead")}
        fields["status"] = SweepStatus(fields["status"])
        fields["baseline"] = StepMeasurement(**fields["baseline"])
        fields["planned"] = StepMeasurement(**fields["planned"])
        return SweepRow(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise LowtideError(f"not a row of a sweep: {error}") from error
