"""The progress of the library, in one line on stderr, on a terminal or in a notebook.

A terminal shows a bar, a notebook text; elsewhere nothing is shown. The line disappears when the work ends,
fails or is interrupted.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

REFRESHES_PER_SECOND = 4
"""Each takes time from the ops that are measured meanwhile."""
WIDTH = 60


class Display:
    """The line; without a `bar` it shows nothing."""

    def __init__(self, bar: "Progress | None" = None) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None) if bar is not None else None

    def stage(self, text: str) -> None:
        """Begin a stage, without a count so far."""
        if self._bar is not None and self._task is not None:
            self._bar.reset(self._task, description=text, total=None)

    def count(self, done: int, total: int) -> None:
        """The progress of the current stage."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total)


class Line(Display):
    """The line in a notebook: text that is written over itself."""

    def __init__(self) -> None:
        super().__init__()
        self._text = ""
        self._written = 0.0

    def stage(self, text: str) -> None:
        self._text = text
        self._write(text)

    def count(self, done: int, total: int) -> None:
        if done >= total or time.monotonic() - self._written > 1 / REFRESHES_PER_SECOND:
            self._write(f"{self._text} {done}/{total}")

    def clear(self) -> None:
        self._write("")

    def _write(self, text: str) -> None:
        self._written = time.monotonic()
        sys.stderr.write(f"\r{text:<{WIDTH}}\r{text}")
        sys.stderr.flush()


_current: list[Display] = []


@contextmanager
def shown() -> Iterator[Display]:
    """The caller's line, else a new line for the duration of the block."""
    if _current:
        yield _current[-1]
        return
    if in_notebook():
        line = Line()
        try:
            with _as_current(line):
                yield line
        finally:
            line.clear()
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
        # output of the user's model to a file or a pipe stays there
        redirect_stdout=sys.stdout.isatty(),
    )
    with bar, _as_current(Display(bar)) as display:
        yield display


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


@contextmanager
def silenced() -> Iterator[None]:
    """Show nothing inside the block, for a caller with its own display."""
    with _as_current(Display()):
        yield


@contextmanager
def _as_current(display: Display) -> Iterator[Display]:
    _current.append(display)
    try:
        yield display
    finally:
        _current.remove(display)
