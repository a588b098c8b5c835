"""What was measured, as the records that reports show."""

from lowtide.measure.clock import Timing
from lowtide.report.records import Measurement, StepMeasurement
from lowtide.verification import Verification


def measurement_of(result: Verification) -> Measurement:
    """A verified plan, next to the plain step."""
    return Measurement(
        baseline=step_measurement(
            predicted=result.baseline_predicted_peak_bytes,
            measured=result.baseline_measured_peak_bytes,
            timing=result.baseline_step_timing,
        ),
        planned=step_measurement(
            predicted=result.predicted_peak_bytes,
            measured=result.measured_peak_bytes,
            timing=result.step_timing,
        ),
        overhead=result.overhead,
        exact=result.exact,
        differences=result.differences,
        method="torch's count of bytes, " + ("fresh processes" if result.fresh_process else "in one process"),
    )


def step_measurement(*, predicted: int, measured: int, timing: Timing | None) -> StepMeasurement:
    return StepMeasurement(
        predicted_peak_bytes=predicted,
        measured_peak_bytes=measured,
        seconds_median=timing.median_seconds if timing else None,
        seconds_spread=timing.spread_seconds if timing else None,
    )
