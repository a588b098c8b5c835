"""A verification in words: whether the plan fits, whether it is exact, and unreliable measurements.

- `verdict`: the answer in a few lines
- `prediction_note`, `agreement_notes`, `fault_note`, `nondeterminism_note`: where a prediction is off, where
  two measured peaks disagree, where page faults take a good part of the time, where eager differs from
  itself; empty where not
- `measurement_of`: the record that reports show
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lowtide.report.results import Measurement, StepMeasurement
from lowtide.report.style import NOT_BY_RECOMPUTING, is_too_noisy, size
from lowtide.units import format_size

if TYPE_CHECKING:
    from lowtide.verification.measure_step import Timing
    from lowtide.verification.verify_plan import Verification

MAX_DIFFERENCES = 5
NO_SETTING = (
    "No setting of torch that was tried makes two trainings equal: look for random numbers that are not "
    "torch's, or for an op of your own"
)
PREDICTED_WITHIN = 0.01
"""A budget is kept where the measured peak is at or below it, and the predicted peak is within this share of
the measured one."""
AGREE_WITHIN = 0.02
MORE = (
    "memory that torch does not count, such as buffers of libraries and of Python, or pages that were given "
    "back late"
)
LESS = "blocks that torch asked for and never wrote to, or that took pages which were there before"
SMALL_BYTES = 1 << 20
"""Below this, pages and the allocator's own blocks dominate the kernel's figure."""
LEAST_SHARE = 0.03
"""A smaller share of a step's time is within the noise of any machine."""


def verdict(result: "Verification") -> list[str]:
    lines = _kept(result)
    if result.rounding is not None:
        lines.append(f"results: NOT EXACT, the plan rounds: {result.rounding}")
    if result.exact:
        lines.append(f"results: {_equal_to(result)}")
    elif result.differences or result.rounding is None:
        lines.append(f"results: DIFFERENT from eager training in {len(result.differences)} places")
        lines += [f"  {difference}" for difference in result.differences[:MAX_DIFFERENCES]]
        if result.recompute_exact:
            lines.append(f"note: {NOT_BY_RECOMPUTING}")
    if is_too_noisy(result.overhead, result.noise):
        lines.append(
            "note: the time added is too noisy to tell: the machine is busy, or the plan adds next to none"
        )
    lines += [f"note: {note}" for note in result.notes]
    if not result.fresh_process:
        lines.append("note: measured in this process, since the model cannot be sent to a fresh process")
    return lines


def _equal_to(result: "Verification") -> str:
    reference = "the compiled step without recompute," if result.from_eager else "eager training"
    if result.deterministic_with:
        return f"equal to {reference} to the last bit, compared with {result.deterministic_with}"
    if result.eager_differences:
        return f"as far from {reference.rstrip(',')} as that is from itself, and no further"
    return f"equal to {reference} to the last bit"


def nondeterminism_note(result: "Verification") -> str:
    """Which ops make eager differ from itself, and what switches that off; empty where eager is exact."""
    count = len(result.eager_differences)
    if not count:
        return ""
    ops = ", ".join(result.nondeterministic_ops)
    cause = f"by {ops}" if ops else "and no op does when it runs again alone"
    off = f"{result.deterministic_with} switches that off" if result.deterministic_with else NO_SETTING
    return (
        f"eager training differs from itself in {count} place{'s' if count > 1 else ''}, {cause}: these are "
        f"not the plan's ({result.eager_differences[0]}). {off}"
    )


def _kept(result: "Verification") -> list[str]:
    """The measured peak and what was reserved; the one that has the budget is compared with it."""
    reserved, budget_bytes = result.measured_reserved_bytes, result.reserved_budget_bytes
    if reserved is None:
        return [kept(result.measured_peak_bytes, result.budget_bytes)]
    words = f"reserved by the allocator: {size(reserved)}, {size(result.predicted_reserved_bytes)} predicted"
    if budget_bytes is None:
        return [kept(result.measured_peak_bytes, result.budget_bytes), words]
    over = "at or below" if reserved <= budget_bytes else "ABOVE"
    return [
        f"peak: {size(result.measured_peak_bytes)}",
        f"{words}, {over} the budget of {size(budget_bytes)}",
    ]


def kept(peak_bytes: int, budget_bytes: int) -> str:
    over = "at or below" if peak_bytes <= budget_bytes else "ABOVE"
    return f"peak: {size(peak_bytes)}, {over} the budget of {size(budget_bytes)}"


def prediction_note(which: str, *, predicted: int, measured: int, op: str) -> str:
    """Empty where the prediction is right. `op` ran at the measured peak; empty where that is unknown."""
    off = predicted / measured - 1 if measured else 0.0
    if abs(off) <= PREDICTED_WITHIN:
        return ""
    at = f" at {op}" if op else ""
    return (
        f"the peak {which} was predicted as {format_size(predicted)}, {abs(off):.1%} "
        f"{'above' if off > 0 else 'below'} the {format_size(measured)} that were measured{at}"
    )


def agreement_notes(peaks: Sequence[tuple[str, int, int | None]]) -> list[str]:
    """Of the steps `(which, measured, resident)`, a line about those where torch's count and the kernel's
    disagree; one line for several with the same reason."""
    found: dict[str, list[tuple[str, int, int]]] = {}
    for which, measured, resident in peaks:
        if resident is not None and abs(resident - measured) > max(AGREE_WITHIN * measured, SMALL_BYTES):
            found.setdefault(MORE if resident > measured else LESS, []).append((which, measured, resident))
    return [
        f"the two measured peaks {' and '.join(which for which, _, _ in rows)} disagree: torch counts "
        f"{' and '.join(format_size(measured) for _, measured, _ in rows)}, the kernel "
        f"{' and '.join(format_size(resident) for _, _, resident in rows)} ({why})"
        for why, rows in found.items()
    ]


def fault_note(without: "Timing | None", with_plan: "Timing | None") -> str:
    """Empty where page faults take next to no time, with and without the plan, or were not counted."""
    if without is None or with_plan is None:
        return ""
    if max(without.fault_share, with_plan.fault_share) < LEAST_SHARE:
        return ""
    return (
        "getting memory from the system is part of the measured time and of no prediction: "
        f"{without.median_page_faults:,} page faults in a step without the plan and "
        f"{with_plan.median_page_faults:,} with it, about {without.fault_share:.0%} and "
        f"{with_plan.fault_share:.0%} of the time. The page on measuring says how to keep that memory"
    )


def measurement_of(result: "Verification") -> Measurement:
    """A verified plan, next to the baseline."""
    return Measurement(
        baseline=step_measurement(
            predicted=result.baseline_predicted_peak_bytes,
            measured=result.baseline_measured_peak_bytes,
            resident=result.baseline_resident_peak_bytes,
            reserved=result.baseline_measured_reserved_bytes,
            timing=result.baseline_step_timing,
        ),
        planned=step_measurement(
            predicted=result.predicted_peak_bytes,
            measured=result.measured_peak_bytes,
            resident=result.resident_peak_bytes,
            reserved=result.measured_reserved_bytes,
            timing=result.step_timing,
        ),
        noise=result.noise,
        exact=None if result.rounding is not None and not result.differences else result.exact,
        rounding="" if result.rounding is None else str(result.rounding),
        recompute_exact=result.recompute_exact,
        differences=result.differences,
        eager_differences=result.eager_differences,
        notes=result.notes,
        method=_method(result),
    )


def _method(result: "Verification") -> str:
    where = "fresh processes" if result.fresh_process else "in one process"
    timing = result.step_timing
    pairs = f"; {len(timing.runs)} pairs of steps timed in turn" if timing else ""
    return f"torch's count of bytes, {where}{pairs}"


def step_measurement(
    *,
    predicted: int,
    measured: int,
    timing: "Timing | None",
    resident: int | None = None,
    reserved: int | None = None,
) -> StepMeasurement:
    return StepMeasurement(
        predicted_peak_bytes=predicted,
        measured_peak_bytes=measured,
        resident_peak_bytes=resident,
        reserved_peak_bytes=reserved,
        seconds_median=timing.median_seconds if timing else None,
        seconds_spread=timing.spread_seconds if timing else None,
    )
