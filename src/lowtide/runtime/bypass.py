"""Tell once where a planned model, or a copy of it, trains without the plan."""

import logging
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from lowtide.runtime.backend import Progress
from lowtide.torch_compat.modules import route_of

logger = logging.getLogger("lowtide")

NAME = "_lowtide_plan"
BYPASSED = (
    "the model got gradients, but {cause}, so that the budget is not kept: call model(...) itself, not "
    "model.forward(...), and not from inside of torch.compile"
)
COPIED = "a copy of a planned model trains without a plan: apply one to it with plan.apply(copy)"
SAVED = (
    "a planned model was saved without its plan: save that with plan.save(path), and apply it after loading"
)


class Marker:
    """Stands in a planned model's attributes: sees copies being made, and gradients that come past the plan.

    Files get None in its place.
    """

    def __init__(self, model: nn.Module, progress: Progress, *, applied: Any) -> None:
        self._told: set[str] = set()
        self._parameter = next((p for p in model.parameters() if p.requires_grad), None)
        self._handle = None
        if self._parameter is not None:
            watch = _watch(weakref.ref(self), weakref.ref(model), progress, applied=weakref.ref(applied))
            self._handle = self._parameter.register_post_accumulate_grad_hook(watch)  # type: ignore[no-untyped-call]

    def tell(self, words: str) -> None:
        if words not in self._told:
            self._told.add(words)
            logger.warning(words)

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> "CopyMarker | None":
        # attributes are copied in their order, the parameters first
        copied = memo.get(id(self._parameter))
        return None if copied is None else CopyMarker(self, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        self.tell(SAVED)
        return type(None), ()


class CopyMarker:
    """Stands in the attributes of a planned model's copy, until that gets a plan of its own."""

    def __init__(self, original: Marker, parameter: nn.Parameter) -> None:
        self._handle = parameter.register_post_accumulate_grad_hook(lambda _: original.tell(COPIED))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        self._handle.remove()

    def __deepcopy__(self, _memo: Any) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _watch(
    marker: "weakref.ref[Marker]",
    model: "weakref.ref[nn.Module]",
    progress: Progress,
    *,
    applied: "weakref.ref[Any]",
) -> Callable[[Any], None]:
    """A hook of one parameter: a gradient that no planned backward pass came before was made without one."""
    seen = progress.backwards

    def look(_parameter: Any) -> None:
        nonlocal seen
        here, owner = marker(), model()
        if here is not None and owner is not None and progress.backwards == seen:
            compiled = route_of(owner) is not applied()
            cause = "model.compile() took the place of its plan" if compiled else "its plan did not run"
            here.tell(BYPASSED.format(cause=cause))
        seen = progress.backwards

    return look


def mark(model: nn.Module, progress: Progress, *, applied: Any) -> None:
    """Watch a model that runs by a plan; `applied` is what its calls go to."""
    unmark(model)
    vars(model)[NAME] = Marker(model, progress, applied=applied)


def unmark(model: nn.Module) -> None:
    marker = vars(model).pop(NAME, None)
    if marker is not None:
        marker.remove()
