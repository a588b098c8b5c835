"""Tell once where a planned model trains, or is copied, without its plan."""

import logging
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from lowtide.running.backend import Progress
from lowtide.torchside.route import route_of

logger = logging.getLogger("lowtide")

NAME = "_lowtide_plan"


class Marker:
    """Stands in a planned model's attributes: sees copies being made, and gradients that come past the plan.

    Copies and files get None in its place.
    """

    def __init__(self, model: nn.Module, progress: Progress, *, applied: Any) -> None:
        self._told: set[str] = set()
        trained = next((parameter for parameter in model.parameters() if parameter.requires_grad), None)
        self._handle = None
        if trained is not None:
            watch = _watch(weakref.ref(self), weakref.ref(model), progress, applied=weakref.ref(applied))
            self._handle = trained.register_post_accumulate_grad_hook(watch)  # type: ignore[no-untyped-call]

    def tell(self, about: str, words: str) -> None:
        if about not in self._told:
            self._told.add(about)
            logger.warning(words)

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def __deepcopy__(self, _memo: Any) -> None:
        self.tell("copy", COPIED)

    def __reduce__(self) -> tuple[Any, ...]:
        self.tell("copy", COPIED)
        return type(None), ()


COPIED = "a copy of a planned model has no plan: to train it, too, apply one to it with plan.apply(copy)"


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
            here.tell(
                "bypass",
                f"the model got gradients, but {cause}, so that the budget is not kept: call model(...) "
                "itself, not model.forward(...), and not from inside of torch.compile",
            )
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
