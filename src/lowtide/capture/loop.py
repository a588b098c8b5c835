"""What a training loop does with a model's output, as far as the user told."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from lowtide.torchside.optimizers import as_one

Loss = Callable[[Any], torch.Tensor]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Loop:
    """The loss and the optimizers that a step was captured with, and the bytes held besides; the optimizers
    are not kept alive.

    `holds_outputs`: whether it holds what the model returned, besides the loss, until backward is over.
    """

    loss: Loss | None = None
    references: "tuple[weakref.ref[torch.optim.Optimizer], ...]" = ()
    holds_outputs: bool = True
    reserve_bytes: int = 0

    @classmethod
    def of(
        cls,
        optimizer: Optimizers | None,
        loss: Loss | None,
        *,
        holds_outputs: bool = True,
        reserve_bytes: int = 0,
    ) -> Self:
        every = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer or ()
        return cls(loss, tuple(weakref.ref(each) for each in every), holds_outputs, reserve_bytes)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """All of them as one; None where there is none, or one of them is gone."""
        alive = [each for reference in self.references if (each := reference()) is not None]
        return as_one(alive) if len(alive) == len(self.references) else None
