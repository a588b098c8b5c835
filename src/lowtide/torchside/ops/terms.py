"""A gradient that leaves a graph as the terms of a sum, which autograd then adds up itself."""

from typing import Any

import torch


def terms(*gradients: torch.Tensor) -> torch.Tensor:
    """An op of backward graphs: one tensor that carries all `gradients` to where they are added up."""
    carrier: Any = gradients[0].detach()
    carrier.lowtide_terms = gradients
    return carrier  # type: ignore[no-any-return]


def taken_apart(carrier: Any) -> tuple[torch.Tensor, ...]:
    """The gradients that `terms` was given, or the one that no such op has seen. Only once: autograd would
    copy what is known elsewhere."""
    gradients: tuple[torch.Tensor, ...] | None = getattr(carrier, "lowtide_terms", None)
    if gradients is None:
        return (carrier,)
    del carrier.lowtide_terms
    return gradients
