"""What a training loop does with a model's output, as far as the user told."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch

Loss = Callable[[Any], torch.Tensor]
Optimizer = torch.optim.Optimizer


@dataclass(frozen=True, slots=True)
class Loop:
    """The loss and the optimizer that a step was captured with; the optimizer is not kept alive."""

    loss: Loss | None = None
    reference: "weakref.ref[Optimizer] | None" = None

    @classmethod
    def of(cls, optimizer: Optimizer | None, loss: Loss | None) -> Self:
        return cls(loss, None if optimizer is None else weakref.ref(optimizer))

    @property
    def optimizer(self) -> Optimizer | None:
        """None where there is none any more."""
        return None if self.reference is None else self.reference()
