"""The output of one command: data on stdout, progress and errors on stderr.

Also the exit code of each error, tables, and the output folder of a command.
"""

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import typer
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.logging import RichHandler
from rich.measure import Measurement
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from lowtide import display
from lowtide.errors import BudgetTooSmall, FreshProcessError, LowtideError
from lowtide.experiments.machine import NotEnoughMemory
from lowtide.facts.sizes import BadSize


class UsageError(LowtideError):
    """Options that contradict each other."""


class Exit(IntEnum):
    DONE = 0
    ERROR = 1
    USAGE = 2
    DOES_NOT_FIT = 3
    RESULTS_DIFFER = 4
    INTERRUPTED = 130


def exit_code(error: BaseException) -> Exit:
    match error:
        case KeyboardInterrupt():
            return Exit.INTERRUPTED
        case BudgetTooSmall() | NotEnoughMemory():
            return Exit.DOES_NOT_FIT
        case _ if _is_out_of_memory(error):
            return Exit.DOES_NOT_FIT
        case BadSize() | UsageError():
            return Exit.USAGE
        case _:
            return Exit.ERROR


def one_line(error: BaseException) -> str:
    """The text about an error without `-v`."""
    text = " ".join(str(error).split())
    if isinstance(error, LowtideError):
        return text
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if _is_out_of_memory(error):
        return f"{'. '.join(text.split('. ')[:3])}: try a smaller batch, or end what else is on the device"
    return f"{type(error).__name__}: {text} (this should not happen; -v shows where)"


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether an accelerator's allocator had no memory left; a command without torch never asks torch."""
    kind = error.kind if isinstance(error, FreshProcessError) else type(error).__name__
    return kind == "OutOfMemoryError"


class Dotted:
    """A dotted name in a cell; it wraps only after its dots."""

    def __init__(self, name: str) -> None:
        self._parts = [f"{part}." for part in name.split(".")[:-1]] + [name.rpartition(".")[2]]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        lengths = [len(part) for part in self._parts]
        return Measurement(max(lengths), sum(lengths)).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [""]
        for part in self._parts:
            if lines[-1] and len(lines[-1]) + len(part) > options.max_width:
                lines.append("")
            lines[-1] += part
        yield Text("\n".join(lines), overflow="fold")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table; columns whose name ends in `>` are numbers, to the right. On a narrow terminal long cells
    go over several lines, the longest columns first; nothing is cut off.

    Without any column names there is no head. Cells are plain text: a module named `[red]` is only a name.
    """
    result = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    result.show_header = any(column.removesuffix(">") for column in columns)
    for column in columns:
        is_number = column.endswith(">")
        result.add_column(
            column.removesuffix(">"),
            justify="right" if is_number else "left",
            overflow="fold",
        )
    for row in rows:
        result.add_row(*(cell if isinstance(cell, Dotted) else Text(str(cell)) for cell in row))
    return result


def claim_folder(folder: Path | None, names: Sequence[str], *, force: bool) -> Path | None:
    """The output folder, made if missing; an error where files exist, unless `force`.

    Checked before the work, which may take minutes.
    """
    if folder is None:
        return None
    there = [name for name in names if (folder / name).exists()]
    if there and not force:
        raise LowtideError(
            f"{folder / there[0]} is already there: say --force to replace it, or choose another -o"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise LowtideError(f"cannot write into the folder {folder}: {error.strerror}") from error
    return folder


NOTE = "note: "
PIPE_WIDTH = 160
"""The width of a table in a file or a pipe: the width of its reader is unknown."""


def _stdout() -> Console:
    is_piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(file=sys.stdout, width=PIPE_WIDTH if is_piped else None, highlight=False)


def _stderr() -> Console:
    return Console(stderr=True, highlight=False)


@dataclass(slots=True, kw_only=True)
class Terminal:
    """`as_json`: one JSON value on stdout instead of tables. `quiet`: nothing on stderr but errors."""

    as_json: bool = False
    quiet: bool = False
    verbose: bool = False
    out: Console = field(default_factory=_stdout)
    err: Console = field(default_factory=_stderr)
    logged: set[str] = field(default_factory=set)
    shown: set[str] = field(default_factory=set)

    def show(self, *renderables: RenderableType) -> None:
        """Tables and text for people; nothing under `--json`. A note is shown once, and not beside a log line
        that said the same."""
        for renderable in () if self.as_json else renderables:
            if isinstance(renderable, Text) and renderable.plain.startswith(NOTE):
                note = renderable.plain.removeprefix(NOTE)
                is_read = note in self.logged and self.out.is_terminal and self.err.is_terminal
                if is_read or note in self.shown:
                    continue
                self.shown.add(note)
            self.out.print(renderable)

    def show_lines(self, *lines: str) -> None:
        """Text to paste elsewhere: no line is wrapped."""
        for line in () if self.as_json else lines:
            self.out.print(line, markup=False, soft_wrap=True)

    def data(self, value: Any) -> None:
        """The same for programs; nothing without `--json`."""
        if self.as_json:
            self.out.file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def note(self, text: str) -> None:
        """A line on stderr about finished work."""
        if not self.quiet:
            self.err.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Show on a terminal that work is going on."""
        if self.quiet or not self.err.is_terminal:
            yield
            return
        with self.err.status(text):
            yield

    @contextmanager
    def counting(self, text: str) -> Iterator[Callable[[int, int], None]]:
        """A bar on a terminal for work that reports `(done, total)`."""
        if self.quiet or not self.err.is_terminal:
            yield lambda done, total: None
            return
        with Progress(console=self.err, transient=True) as bar:
            task = bar.add_task(text, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def session(*, as_json: bool, quiet: bool, verbose: bool) -> Iterator[Terminal]:
    """Run a command's body. An error ends the command with one line and its exit code.

    With `verbose` the traceback comes before that line. The output of a model or its factory goes to stderr:
    stdout is for the command's data alone.
    """
    terminal = Terminal(as_json=as_json, quiet=quiet, verbose=verbose)
    with _logging(terminal), redirect_stdout(sys.stderr), display.silenced():
        try:
            yield terminal
        except (typer.Exit, BrokenPipeError):
            raise
        except (Exception, KeyboardInterrupt) as error:
            if verbose:
                terminal.err.print("".join(traceback.format_exception(error)), markup=False, soft_wrap=True)
                if isinstance(error, FreshProcessError):
                    terminal.err.print(error.details, markup=False, soft_wrap=True)
            prefix = "" if isinstance(error, KeyboardInterrupt) else "error: "
            terminal.err.print(f"{prefix}{one_line(error)}", markup=False, soft_wrap=True)
            raise typer.Exit(exit_code(error)) from None


@contextmanager
def _logging(terminal: Terminal) -> Iterator[None]:
    """lowtide's own log lines, warnings and up unless `-q` or `-v` say otherwise, on stderr."""
    logger = logging.getLogger("lowtide")
    handler = RichHandler(console=terminal.err, show_time=False, show_path=False, markup=False)
    level = logger.level

    def remember(record: logging.LogRecord) -> bool:
        terminal.logged.add(record.getMessage())
        return True

    handler.addFilter(remember)
    logger.addHandler(handler)
    logger.setLevel(
        logging.ERROR if terminal.quiet else logging.DEBUG if terminal.verbose else logging.WARNING
    )
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
