"""Optimizers by name."""

from typing import Any

import torch
from torch import nn

from lowtide.errors import TargetError

_KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"lr": 1e-3}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
}
_VARIANTS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "single": {"foreach": False},
}


def make_optimizer(text: str, model: nn.Module) -> torch.optim.Optimizer | None:
    """`adam`, `adamw`, `sgd` (momentum 0.9) or `none`; a variant follows a colon, as in `adam:fused`.

    Variants: `foreach`, `fused`, `single` (one parameter at a time). Without one, torch chooses.
    """
    name, _, variant = text.partition(":")
    if text == "none":
        return None
    if name not in _KINDS or (variant or "fused") not in _VARIANTS:
        raise TargetError(
            f"cannot read the optimizer '{text}': write {', '.join(_KINDS)} or none, "
            f"with a variant ({', '.join(_VARIANTS)}) after a colon if wanted, as in adam:fused"
        )
    kind, options = _KINDS[name]
    return kind(model.parameters(), **options, **_VARIANTS.get(variant, {}))
