"""Train a PyTorch model inside a memory budget given in bytes.

    model = lowtide.checkpoint(model, batch, budget="8GiB", optimizer=optimizer)

Names are loaded when first used, so that `import lowtide` does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lowtide.errors import (
    BudgetTooSmall,
    CannotMoveToFreshProcess,
    CaptureError,
    FreshProcessError,
    LowtideError,
    PlanMismatch,
    TargetError,
    Unsupported,
    UnsupportedTorch,
)

if TYPE_CHECKING:
    from lowtide.api import checkpoint, profile, verify
    from lowtide.experiments.fit import Fit, fit
    from lowtide.plans import Plan, load_plan
    from lowtide.profiles import Profile, load_profile
    from lowtide.runtime.runner import remove
    from lowtide.verification.verify_plan import Verification

__version__ = "0.2.0"

__all__ = [
    "BudgetTooSmall",
    "CannotMoveToFreshProcess",
    "CaptureError",
    "Fit",
    "FreshProcessError",
    "LowtideError",
    "Plan",
    "PlanMismatch",
    "Profile",
    "TargetError",
    "Unsupported",
    "UnsupportedTorch",
    "Verification",
    "__version__",
    "checkpoint",
    "fit",
    "load_plan",
    "load_profile",
    "profile",
    "remove",
    "verify",
]

_HOMES = {
    "Fit": "experiments.fit",
    "Plan": "plans",
    "Profile": "profiles",
    "Verification": "verification.verify_plan",
    "checkpoint": "api",
    "fit": "experiments.fit",
    "load_plan": "plans",
    "load_profile": "profiles",
    "profile": "api",
    "remove": "runtime.runner",
    "verify": "api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lowtide' has no attribute '{name}'")
    return getattr(importlib.import_module(f"lowtide.{_HOMES[name]}"), name)
