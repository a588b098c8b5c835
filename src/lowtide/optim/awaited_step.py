"""From the step in backward to the `optimizer.step()` of the loop, which must confirm it.

In eager PyTorch, the parameters are still the old ones in between, and the gradients exist. So whatever
happens to them in between is refused. In a trial (see `step_in_backward`), nothing has changed yet: a refusal
gives the gradients back, and all is as in eager.

A loop that was interrupted in between may load its last checkpoint, weights and optimizer: no step is awaited
then.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.errors import Unsupported
from lowtide.optim.split_check import same
from lowtide.optim.updated_parameter import LEAVE_OUT, UsedGradient, guard, unguard
from lowtide.torch_compat.autograd_engine import version_of

Optimizer = torch.optim.Optimizer
Settings = list[dict[str, Any]]


class _Update(NamedTuple):
    """A parameter that a backward pass has updated, its version after that, and in a trial its gradient."""

    parameter: Tensor
    name: str
    version: int
    gradient: Tensor | None


class AwaitedSteps:
    """The updates of a backward pass, by the optimizer that must confirm them."""

    def __init__(self) -> None:
        self._updates: dict[int, list[_Update]] = {}
        self._settings: dict[int, Settings] = {}
        self._replaced: set[int] = set()
        """updated parameters of which all values were replaced since, and optimizers whose state was, by
        identity"""

    def __bool__(self) -> bool:
        return bool(self._updates)

    def add(
        self, optimizer: Optimizer, settings: Settings, parameter: Tensor, name: str, gradient: Tensor | None
    ) -> None:
        """Await the step of one parameter. `settings` of the optimizer were used; a trial has the
        `gradient`."""
        self._settings[id(optimizer)] = settings
        update = _Update(parameter, name, version_of(parameter), gradient)
        self._updates.setdefault(id(optimizer), []).append(update)
        used = UsedGradient.of(parameter)
        used.refused = self.give_back
        parameter.grad = used
        replaced = partial(self.note_replaced, parameter)
        guard(parameter, name, refused=self.give_back, replaced=replaced)

    def note_replaced(self, one: Tensor | Optimizer) -> None:
        """All values of an updated parameter, or all state of an optimizer, are others now. Where nothing is
        left of the steps that are awaited, they are not awaited any more."""
        self._replaced.add(id(one))
        if isinstance(one, Tensor):
            unguard(one)
        updates = [id(update.parameter) for updates in self._updates.values() for update in updates]
        if self._replaced.issuperset((*self._updates, *updates)):
            self.clear()

    def has(self, optimizer: Optimizer) -> bool:
        return id(optimizer) in self._updates

    def refusal(self, text: str) -> Unsupported:
        """The error for a loop that does not call `optimizer.step()` next."""
        self.give_back()
        return Unsupported(f"{text}, or {LEAVE_OUT}")

    def confirm(self, optimizer: Optimizer, take_step: Callable[[Tensor, Tensor], None]) -> None:
        """`optimizer.step()` comes. Refuse it where eager's step would have other parameters, gradients or
        settings; a trial takes its step now."""
        changed = _changed(self._settings[id(optimizer)], settings_of(optimizer))
        if changed:
            raise self.refusal(
                f"'{changed[0]}' of the optimizer changed between backward() and optimizer.step(), "
                "but the step in backward comes before: change it before backward()"
            )
        for update in self._updates[id(optimizer)]:
            gradient = update.parameter.grad
            if not isinstance(gradient, UsedGradient) or gradient.is_zero:
                raise self.refusal(
                    f"the gradient of '{update.name}' was removed or replaced between backward() and "
                    "optimizer.step(), but the step in backward comes before: call zero_grad() "
                    "after optimizer.step()"
                )
            if version_of(update.parameter) != update.version:
                raise self.refusal(
                    f"'{update.name}' changed between backward() and optimizer.step(), but the step in "
                    "backward comes before: change it before backward() or after optimizer.step()"
                )
        updates = self._updates[id(optimizer)]
        try:
            for update in updates:
                unguard(update.parameter)
                if update.gradient is not None:
                    take_step(update.parameter, update.gradient)
            self._forget(optimizer)
        except BaseException:  # an interrupt, say: no parameter stays guarded
            for update in updates:
                unguard(update.parameter)
            self._forget(optimizer)
            raise

    def _forget(self, optimizer: Optimizer) -> None:
        self._settings.pop(id(optimizer), None)
        self._replaced.clear()
        self._updates.pop(id(optimizer), None)

    def give_back(self) -> None:
        """End a trial: the gradients are there as in eager, where the loop has not removed them."""
        every = [update for updates in self._updates.values() for update in updates]
        if not any(update.gradient is not None for update in every):
            return
        self.clear()
        for update in every:
            used = update.parameter.grad
            if isinstance(used, UsedGradient) and update.gradient is not None:
                update.parameter.grad = update.gradient.zero_() if used.is_zero else update.gradient

    def clear(self) -> None:
        """Await nothing."""
        for update in (update for updates in self._updates.values() for update in updates):
            unguard(update.parameter)
        self._updates, self._settings, self._replaced = {}, {}, set()


def settings_of(optimizer: Optimizer) -> Settings:
    """The present learning rate and other settings of every group."""
    return [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def _changed(before: Settings, now: Settings) -> list[str]:
    """The names of the settings that differ."""
    pairs = zip(before, now, strict=False)
    return [name for old, new in pairs for name in new if name in old and not same(old[name], new[name])]
