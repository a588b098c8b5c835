"""An attribute of a planned model that notices copies of the model, and gradients that bypass its plan."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from lowtide.runtime.loop_messages import BYPASSED, COPIED, SAVED
from lowtide.runtime.observer import LoopObserver
from lowtide.torch_compat.modules import route_of

MARKER = "_lowtide_plan"
"""The attribute of a planned model for its `Marker`."""


class Marker:
    """An attribute of a planned model: notices copies of the model, and gradients that bypass the plan.

    A pickled model has None in its place.
    """

    def __init__(self, model: nn.Module, observer: LoopObserver, *, route: Any) -> None:
        self._observer = observer
        self._model, self._route = weakref.ref(model), weakref.ref(route)
        self._backwards = observer.num_backwards
        self._parameter = next((p for p in model.parameters() if p.requires_grad), None)
        self._handle = None
        if self._parameter is not None:
            hook = _weak_hook(weakref.WeakMethod(self._gradient_arrives))
            self._handle = self._parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _gradient_arrives(self) -> None:
        """A gradient without a planned backward pass before it bypassed the plan."""
        model, backwards = self._model(), self._observer.num_backwards
        if model is not None and backwards == self._backwards:
            is_compiled = route_of(model) is not self._route()
            cause = "model.compile() took the place of its plan" if is_compiled else "its plan did not run"
            self._observer.say(BYPASSED % cause)
        self._backwards = backwards

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> "CopyMarker | None":
        # attributes are copied in their order, the parameters first
        copied = memo.get(id(self._parameter))
        return None if copied is None else CopyMarker(self._observer, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        self._observer.say(SAVED)
        return type(None), ()


def _weak_hook(event: "weakref.WeakMethod[Callable[[], None]]") -> Callable[[Any], None]:
    def hook(_parameter: Any) -> None:
        if (told := event()) is not None:
            told()

    return hook


class CopyMarker:
    """An attribute of a planned model's copy, until the copy gets its own plan."""

    def __init__(self, observer: LoopObserver, parameter: nn.Parameter) -> None:
        self._handle = parameter.register_post_accumulate_grad_hook(lambda _: observer.say(COPIED))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        self._handle.remove()

    def __deepcopy__(self, _memo: Any) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def mark(model: nn.Module, observer: LoopObserver, *, route: Any) -> None:
    """Watch a model that runs by a plan; its calls go to `route`."""
    unmark(model)
    vars(model)[MARKER] = Marker(model, observer, route=route)


def unmark(model: nn.Module) -> None:
    marker = vars(model).pop(MARKER, None)
    if marker is not None:
        marker.remove()
