"""Look at what the user's loop keeps live when a call of the model begins, and have it counted.

Gradients that are live then are those of earlier micro-batches, where no optimizer's step came in between:
they stay to the end of the step. After a step of the optimizer they wait for a later `zero_grad`: the next
backward pass shows whether it comes before it.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lowtide.optim.updated_parameter import gradient_bytes
from lowtide.runtime.call_schedules import Schedules
from lowtide.runtime.loop_tensors import LoopTensors
from lowtide.runtime.observer import SMALL_BYTES, LoopObserver
from lowtide.torch_compat.autograd_engine import version_of


class LoopLook:
    """What `schedules` has to count of the loop around one model, whose `parameters` are on `device`."""

    def __init__(
        self,
        observer: LoopObserver,
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        schedules: Schedules,
    ) -> None:
        self.counts_gradients = schedules.counts_gradients
        self._observer, self._parameters, self._schedules = observer, parameters, schedules
        has_budget = schedules.spare_bytes is not None
        self._tensors = LoopTensors(observer.own_tensors, device) if has_budget else None
        self._version = 0
        self._at_call = self._at_backward = 0
        own = weakref.WeakMethod(self._backward_begins)  # an observer can outlive the model
        observer.when_backward_begins = lambda: None if (begins := own()) is None else begins()

    def call_begins(self, batch: Any) -> None:
        """A step begins."""
        if self._tensors is None:
            return
        if self._tensors.looks_left:
            outputs, loss_bytes = self._observer.kept.storages(), self._observer.live_loss_bytes()
            found = self._tensors.call_begins(batch, outputs, loss_bytes=loss_bytes)
            if found is not None:
                self._schedules.see_loop(found)
        before, then = self._at_call, self._at_backward
        self._at_call = self._at_backward = 0
        if not self.counts_gradients:
            return
        self._at_call = self._gradient_bytes()
        if min(before, then) > SMALL_BYTES:
            self._schedules.see_gradients(then, to_the_end=True, is_seen=True)
        elif self._at_call > SMALL_BYTES:
            has_stepped = self._version != self._present_version()
            self._schedules.see_gradients(self._at_call, to_the_end=not has_stepped, is_seen=False)

    def another_call(self, batch: Any) -> None:
        """A step calls the model again, before the backward pass of an earlier call."""
        if self._tensors is not None:
            self._tensors.another_call(batch)
        # backward passes between the calls: gradients stay, to which the others are added
        if self.counts_gradients and (nbytes := self._gradient_bytes()) > SMALL_BYTES and not self._at_call:
            self._schedules.see_gradients(nbytes, to_the_end=True, is_seen=True)

    def call_ends(self) -> None:
        if self.counts_gradients:
            self._version = self._present_version()

    def _backward_begins(self) -> None:
        if self._tensors is not None:
            self._tensors.backward_begins()
        if self._at_call:
            self._at_backward = self._gradient_bytes()

    def _gradient_bytes(self) -> int:
        return sum(map(gradient_bytes, self._parameters))

    def _present_version(self) -> int:
        """A number that grows with every step of an optimizer."""
        return sum(map(version_of, self._parameters))
