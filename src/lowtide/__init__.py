"""Train a PyTorch model inside a memory budget given in bytes.

    model = lowtide.checkpoint(model, batch, budget="8GiB", optimizer=optimizer)

Public are the names of this module (`lowtide.__all__`), those of `lowtide.integrations.transformers` and
`lowtide.integrations.lightning`, the command `lowtide` and the files that it writes. Every other module is
private: it may change in any version.

Names are loaded when first used, so that `import lowtide` does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lowtide.errors import (
    BadSize,
    BudgetTooSmall,
    CannotMoveToFreshProcess,
    CaptureError,
    FreshProcessError,
    LowtideError,
    PlanMismatch,
    RankError,
    StoreError,
    TargetError,
    Unsupported,
    UnsupportedTorch,
)

if TYPE_CHECKING:
    from lowtide.api import checkpoint, measure_step, profile, verify
    from lowtide.experiments.fit import Check, Fit, FitRow, fit
    from lowtide.experiments.out_of_memory import explain_out_of_memory
    from lowtide.facts import Activation, Decision, Node
    from lowtide.ops.repeatable_ops import repeatable
    from lowtide.parallel.microbatches import microbatches_in_flight
    from lowtide.plans import Plan, load_plan
    from lowtide.profiles import Profile, load_profile
    from lowtide.profiling.peak_counter import peak_bytes
    from lowtide.runtime.apply import plan_of
    from lowtide.runtime.runner import remove
    from lowtide.verification.measure_step import Measured, Timing
    from lowtide.verification.verify_plan import Verification

__version__ = "0.2.0"

__all__ = [
    "Activation",
    "BadSize",
    "BudgetTooSmall",
    "CannotMoveToFreshProcess",
    "CaptureError",
    "Check",
    "Decision",
    "Fit",
    "FitRow",
    "FreshProcessError",
    "LowtideError",
    "Measured",
    "Node",
    "Plan",
    "PlanMismatch",
    "Profile",
    "RankError",
    "StoreError",
    "TargetError",
    "Timing",
    "Unsupported",
    "UnsupportedTorch",
    "Verification",
    "__version__",
    "checkpoint",
    "explain_out_of_memory",
    "fit",
    "load_plan",
    "load_profile",
    "measure_step",
    "microbatches_in_flight",
    "peak_bytes",
    "plan_of",
    "profile",
    "remove",
    "repeatable",
    "verify",
]

_HOMES = {
    "api": ("checkpoint", "measure_step", "profile", "verify"),
    "experiments.fit": ("Check", "Fit", "FitRow", "fit"),
    "experiments.out_of_memory": ("explain_out_of_memory",),
    "facts": ("Activation", "Decision", "Node"),
    "ops.repeatable_ops": ("repeatable",),
    "parallel.microbatches": ("microbatches_in_flight",),
    "plans": ("Plan", "load_plan"),
    "profiles": ("Profile", "load_profile"),
    "profiling.peak_counter": ("peak_bytes",),
    "runtime.apply": ("plan_of",),
    "runtime.runner": ("remove",),
    "verification.measure_step": ("Measured", "Timing"),
    "verification.verify_plan": ("Verification",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"lowtide.{module}"), name)
    raise AttributeError(f"module 'lowtide' has no attribute '{name}'")


def __dir__() -> list[str]:
    """Every public name, loaded or not, for completion."""
    return sorted({*globals(), *__all__})
