"""What was measured, as the records that reports show."""

from typing import TYPE_CHECKING

from lowtide.checking.clock import Timing
from lowtide.report.records import Measurement, StepMeasurement

if TYPE_CHECKING:
    from lowtide.checking.verification import Verification


def measurement_of(result: "Verification") -> Measurement:
    """A verified plan, next to the plain step."""
    return Measurement(
        baseline=step_measurement(
            predicted=result.baseline_predicted_peak_bytes,
            measured=result.baseline_measured_peak_bytes,
            resident=result.baseline_resident_peak_bytes,
            timing=result.baseline_step_timing,
        ),
        planned=step_measurement(
            predicted=result.predicted_peak_bytes,
            measured=result.measured_peak_bytes,
            resident=result.resident_peak_bytes,
            timing=result.step_timing,
        ),
        noise=result.noise,
        exact=result.exact,
        recompute_exact=result.recompute_exact,
        differences=result.differences,
        notes=result.notes,
        method="torch's count of bytes, " + ("fresh processes" if result.fresh_process else "in one process"),
    )


def step_measurement(
    *, predicted: int, measured: int, timing: Timing | None, resident: int | None = None
) -> StepMeasurement:
    return StepMeasurement(
        predicted_peak_bytes=predicted,
        measured_peak_bytes=measured,
        resident_peak_bytes=resident,
        seconds_median=timing.median_seconds if timing else None,
        seconds_spread=timing.spread_seconds if timing else None,
    )
