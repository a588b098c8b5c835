"""The true peak and the time of one training step, measured: earlier home of `lowtide.measure_step`.

Here `measure_step` takes a `Target`, and raises where its model cannot be sent to a fresh process; there,
`measure_here` measures a copy in this one.
"""

from lowtide.verification.measure_step import (
    Measured,
    Timing,
    measure_here,
    measure_step,
    static_bytes,
    train_step,
)

__all__ = ["Measured", "Timing", "measure_here", "measure_step", "static_bytes", "train_step"]
