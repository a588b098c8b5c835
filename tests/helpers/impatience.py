"""What tests need not wait for, in whichever process they run."""

from collections.abc import Callable

from torch._dynamo import guards

from lowtide.planning import auto
from lowtide.profiling import devices, op_costs
from lowtide.profiling.op_trials import Trial

SHORT_SEARCH = {
    "MOVES_PER_OP": 30,
    "FLOOR_MOVES": 1000,
    "NUM_FAILURES": 2,
    "NUM_REFINEMENTS": 6,
}
"""A shorter search of `auto`: enough wherever any plan will do. Tests of planning search as users do."""


def be_impatient(set_attribute: Callable[[object, str, object], None] = setattr) -> None:
    """Take what is timed on a busy machine for good enough, and do not try often to get better times."""
    set_attribute(Trial, "noisy", False)
    set_attribute(op_costs, "ROUNDS", 3)
    set_attribute(devices, "_REST_SECONDS", 0.0)
    for name, value in SHORT_SEARCH.items():
        set_attribute(auto, name, value)
    # torch empties the processor's caches after each trace, to log how long guards take
    set_attribute(guards, "profile_guard_manager", lambda *_: 0.0)
