"""Replace a function of torch in the whole process, as long as an object needs that, and no longer."""

import weakref
from collections.abc import Callable
from typing import Any


class ProcessPatch:
    """`owner.name` is `wrap(original)` from the first `hold` until the last holder is released.

    A function that other code put over the replacement meanwhile stays, and with it the replacement, which
    therefore has to pass calls on where there is no holder.
    """

    def __init__(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Any]) -> None:
        self.owner, self.name, self.wrap = owner, name, wrap
        self._holders = 0
        self._original: Any = None
        self._replacement: Any = None

    def hold(self, holder: object) -> "weakref.finalize[[], object]":
        """Replace the function for `holder`; the result, when called, releases it, and so does its end."""
        self._holders += 1
        if self._holders == 1:
            self._original = getattr(self.owner, self.name)
            self._replacement = self.wrap(self._original)
            setattr(self.owner, self.name, self._replacement)
        release = weakref.finalize(holder, self._release)
        release.atexit = False
        return release

    def _release(self) -> None:
        self._holders -= 1
        if self._holders == 0:
            if getattr(self.owner, self.name) is self._replacement:
                setattr(self.owner, self.name, self._original)
            self._original = self._replacement = None
