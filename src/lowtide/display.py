"""What the library is doing, in one line on stderr, where somebody is looking.

Nothing is shown where stderr is no terminal. The line goes when the work ends, fails or is interrupted.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

REFRESHES_PER_SECOND = 4
"""Each takes time from the ops that are measured meanwhile."""


class Display:
    """The line; one without a `bar` shows nothing."""

    def __init__(self, bar: "Progress | None" = None) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None) if bar is not None else None

    def stage(self, text: str) -> None:
        """What is being done from here on; how far it is, nobody knows yet."""
        if self._bar is not None and self._task is not None:
            self._bar.reset(self._task, description=text, total=None)

    def count(self, done: int, total: int) -> None:
        """How far the present stage is."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total)


_current: list[Display] = []


@contextmanager
def shown() -> Iterator[Display]:
    """The line of whoever called us, or else one of our own for as long as this lasts."""
    if _current:
        yield _current[-1]
        return
    if not sys.stderr.isatty():
        yield Display()
        return
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(
        console=Console(stderr=True),
        transient=True,
        refresh_per_second=REFRESHES_PER_SECOND,
        # what the user's model prints to a file or a pipe stays there
        redirect_stdout=sys.stdout.isatty(),
    )
    with bar, _as_current(Display(bar)) as display:
        yield display


@contextmanager
def silenced() -> Iterator[None]:
    """Show nothing inside, for a caller with a display of its own."""
    with _as_current(Display()):
        yield


@contextmanager
def _as_current(display: Display) -> Iterator[Display]:
    _current.append(display)
    try:
        yield display
    finally:
        _current.remove(display)
