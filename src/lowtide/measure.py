"""The true peak and the time of one training step, measured.

`measure_step` does it in fresh processes, the one place where both can be measured well: memory by
two independent methods (`peak`), time apart from memory (`clock`), since the first disturbs the second.
"""

from lowtide.verification.measure_step import Measured, Timing, measure_here, measure_step
from lowtide.verification.train_step import static_bytes, train_step

__all__ = ["Measured", "Timing", "measure_here", "measure_step", "static_bytes", "train_step"]
