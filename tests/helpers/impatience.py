"""What tests need not wait for, in whichever process they run."""

from collections.abc import Callable

from torch._dynamo import guards

from lowtide.profiling import devices, op_costs
from lowtide.profiling.op_trials import Trial


def be_impatient(set_attribute: Callable[[object, str, object], None] = setattr) -> None:
    """Take what is timed on a busy machine for good enough, and do not try often to get better times."""
    set_attribute(Trial, "noisy", False)
    set_attribute(op_costs, "ROUNDS", 3)
    set_attribute(devices, "_REST_SECONDS", 0.0)
    # torch empties the processor's caches after each trace, to log how long guards take
    set_attribute(guards, "profile_guard_manager", lambda *_: 0.0)
