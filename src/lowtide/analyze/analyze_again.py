"""The traced graphs of a step, analyzed again for a loop with other settings: no second trace."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lowtide.facts.pipeline import StageInPipeline
from lowtide.optim.joined_optimizers import inner_optimizers, join_optimizers

CapturedT_co = TypeVar("CapturedT_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """The user's statements about the loop around a model; see `capture`."""

    accumulate: bool = False
    reserve_bytes: int = 0
    step_in_backward: bool = False
    holds_outputs: bool = True
    offload_what: tuple[str, ...] = ()
    rounds: tuple[str, ...] = ()
    calls: int = 1
    stage: StageInPipeline | None = None

    @property
    def offload(self) -> bool:
        """Whether activations may be offloaded."""
        return "activations" in self.offload_what


class _Analyze(Protocol[CapturedT_co]):
    def __call__(
        self,
        model: nn.Module,
        batch: Any,
        settings: StepSettings,
        *,
        optimizer: torch.optim.Optimizer | None,
    ) -> CapturedT_co: ...


class AnalyzeAgain(Generic[CapturedT_co]):
    """Calls `analyze` with the model, the batch and the optimizer of a capture, and with other settings.

    References to all three are weak: a profile does not keep them live.
    """

    def __init__(
        self,
        analyze: _Analyze[CapturedT_co],
        model: nn.Module,
        batch: Any,
        settings: StepSettings,
        *,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.settings = settings
        self._analyze = analyze
        self._model = weakref.ref(model)
        leaves, self._structure = pytree.tree_flatten(batch)
        self._leaves = [_reference(leaf) for leaf in leaves]
        self._optimizers = [_reference(each) for each in inner_optimizers(optimizer)] if optimizer else []

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of the loop that are still alive."""
        return [alive for reference in self._optimizers if (alive := reference()) is not _FREED]

    def __call__(
        self, settings: StepSettings, *, optimizers: list[torch.optim.Optimizer] | None = None
    ) -> CapturedT_co | None:
        """The step with these settings, and other optimizers where given; None where the model, a tensor of
        the batch or an optimizer is freed."""
        model, leaves = self._model(), [reference() for reference in self._leaves]
        optimizers = self.optimizers if optimizers is None else optimizers
        freed = any(leaf is _FREED for leaf in leaves) or len(optimizers) < len(self._optimizers)
        if model is None or freed:
            return None
        batch = pytree.tree_unflatten(leaves, self._structure)
        optimizer = join_optimizers(optimizers) if optimizers else None
        return self._analyze(model, batch, settings, optimizer=optimizer)


_FREED = object()


def _reference(value: Any) -> Callable[[], Any]:
    """A weak reference to a value; a strong one to a value that has none, such as a number."""
    try:
        weak = weakref.ref(value)
    except TypeError:
        return lambda: value
    return lambda: _FREED if (alive := weak()) is None else alive
