"""The measured peak beside the loss, in a trainer's own log."""

from torch import nn

from lowtide.profiling.peak_counter import is_resident, peak_bytes

LIVE_KEY = "lowtide/peak_gib"
RESIDENT_KEY = "lowtide/resident_peak_gib"
GIB = 1 << 30


def logged_peak(model: nn.Module) -> dict[str, float]:
    """The peak since the last call, under a name that says what was counted: live bytes of an accelerator, or
    the process's resident bytes."""
    return {RESIDENT_KEY if is_resident(model) else LIVE_KEY: peak_bytes(model) / GIB}
