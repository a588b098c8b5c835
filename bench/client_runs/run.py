"""What a client's `train` gets: how many steps to take, and the one line for lowtide."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import lowtide
from lowtide.trace.model_call import tensors_in

from .peak_watch import STEPS

SHARE = 0.5
"""Of the way from the lowest reachable peak to eager's measured one: where the budget is."""


class Run:
    """Without `eager_peak_bytes` nothing is planned, and the calls below only note what trains.

    A callback makes its plan inside of the library's loop: with `floor_bytes` 0 it is asked for one byte, so
    that its refusal tells the lowest reachable peak, and a second run gets that.
    """

    steps = STEPS

    def __init__(self, *, eager_peak_bytes: int = 0, floor_bytes: int = 0) -> None:
        self.eager_peak_bytes, self.floor_bytes = eager_peak_bytes, floor_bytes
        self.budget_bytes = 0
        self.models: list[nn.Module] = []
        self._batch: list[weakref.ref[torch.Tensor]] = []
        self._made: Callable[[], lowtide.Plan | None] = lambda: None

    def plan(self, model: nn.Module, batch: Any, **options: Any) -> nn.Module:
        """As `lowtide.checkpoint`, with the suite's budget."""
        self.models.append(model)
        self._batch = [weakref.ref(tensor) for tensor in tensors_in([batch])]
        if not self.eager_peak_bytes:
            return model
        found = lowtide.profile(model, batch, **options)
        self.floor_bytes = found.floor_bytes
        plan = found.plan(self._budget())
        self._made = lambda: lowtide.plan_of(model) or plan
        return plan.apply(model)

    def callbacks(self, lowtide_callback: Callable[..., Any], *models: nn.Module) -> list[Any]:
        """One of `lowtide.integrations`, where there is a plan."""
        self.models += models
        if not self.eager_peak_bytes:
            return []
        callback = lowtide_callback(self._budget() if self.floor_bytes else "1B")
        self._made = lambda: callback.plan
        return [callback]

    @property
    def made(self) -> lowtide.Plan | None:
        """The plan that the last steps ran by."""
        return self._made()

    @property
    def batch(self) -> list[torch.Tensor]:
        """What the loop still holds of the batch that was planned for; it may train on it again."""
        return [tensor for each in self._batch if (tensor := each()) is not None]

    def _budget(self) -> int:
        room = max(0, self.eager_peak_bytes - self.floor_bytes)
        self.budget_bytes = self.floor_bytes + int(room * SHARE)
        return self.budget_bytes
