"""Interrupt the main thread at one line of lowtide's code, as Ctrl-C does between any two lines."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lowtide

ROOT = Path(lowtide.__file__).parent
Place = tuple[str, int]


class Lines:
    """Counts how often each line of these packages runs, and raises KeyboardInterrupt before the run `number`
    of the line `place`, if there is one."""

    def __init__(self, packages: tuple[str, ...], place: Place | None = None, number: int = 0) -> None:
        self.packages, self.place, self.number = packages, place, number
        self.counts: dict[Place, int] = {}

    def __call__(self, run: Callable[[], Any]) -> bool:
        """Whether the run was interrupted."""
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            run()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    def _called(self, frame: Any, _event: str, _arg: Any) -> Any:
        path = Path(frame.f_code.co_filename)
        is_ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in self.packages
        # Python swallows what a finalizer raises
        return (
            self._line if is_ours and frame.f_code.co_name not in ("give_back", "__del__", "drop") else None
        )

    def _line(self, frame: Any, event: str, _arg: Any) -> Any:
        if event == "line":
            place = (frame.f_code.co_filename, frame.f_lineno)
            self.counts[place] = self.counts.get(place, 0) + 1
            if place == self.place and self.counts[place] == self.number:
                raise KeyboardInterrupt
        return self._line
