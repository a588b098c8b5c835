"""The output of one command: data on stdout, progress and errors on stderr.

Also tables, and the output folder of a command.
"""

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import typer
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.logging import RichHandler
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from lowtide import display
from lowtide.cli.exit_codes import error_data, exit_code, one_line
from lowtide.errors import BudgetTooSmall, FreshProcessError, LowtideError
from lowtide.facts.levers import lever_lines
from lowtide.folding import folded


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
    """`as_json`: one JSON value on stdout instead of tables. `quiet`: nothing on stderr but errors.

    `after_failure` are commands to type next if the command fails. `sender` begins the line of an error,
    where a script writes to the same terminal.
    """

    as_json: bool = False
    quiet: bool = False
    verbose: int = 0
    out: Console = field(default_factory=_stdout)
    err: Console = field(default_factory=_stderr)
    sender: str = ""
    after_failure: list[str] = field(default_factory=list)
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
            is_unicode = (self.out.encoding or "").lower().startswith("utf")
            self.out.file.write(json.dumps(value, indent=2, ensure_ascii=not is_unicode) + "\n")

    def fail(self, error: BaseException) -> None:
        """One line on stderr about an error, after a refusal one more for each lever; with `--json` also the
        error as the command's one value."""
        prefix = "" if isinstance(error, KeyboardInterrupt) else "error: "
        self.say(f"{self.sender}{prefix}{one_line(error)}")
        if isinstance(error, BudgetTooSmall) and error.levers:
            for line in lever_lines(error.levers, budget_bytes=error.budget_bytes, as_options=True):
                self.say(line)
            self.say(error.remedy)
        self.next_commands(*self.after_failure)
        self.data(error_data(error))

    def note(self, text: str) -> None:
        """A line on stderr about finished work."""
        if not self.quiet:
            self.say(text)

    def next_commands(self, *commands: str) -> None:
        """Commands to type next, on stderr; `   # why` behind one says what for."""
        for number, command in enumerate(commands):
            if not self.quiet:
                self.say(command, start="      " if number else "next: ", is_command=True)

    def say(self, text: str, *, start: str = "", is_command: bool = False) -> None:
        """Text on stderr; on a terminal, over as many lines as it needs."""
        lines = folded(text, self.err.width, start=start, is_command=is_command)
        for line in lines if self.err.is_terminal else [start + text]:
            self.err.print(line, markup=False, soft_wrap=True)

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Show on a terminal what is being done, and since when."""
        with self.counting(text):
            yield

    @contextmanager
    def counting(self, text: str) -> Iterator[Callable[[int, int], None]]:
        """A line on a terminal: what is being done and since when; and a bar once the work reports `(done,
        total)`."""
        if self.quiet or not self.err.is_terminal:
            yield lambda done, total: None
            return
        with Progress(*_COLUMNS, console=self.err, transient=True) as bar:
            task = bar.add_task(text, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


class _Count(ProgressColumn):
    """`12/80`, once the total is known."""

    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{task.completed:.0f}/{task.total:.0f}")


class _Seconds(ProgressColumn):
    """How long the stage has run."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.elapsed or 0:.0f} s")


_COLUMNS = (
    SpinnerColumn("line"),
    TextColumn("{task.description}", markup=False),
    BarColumn(20),
    _Count(),
    _Seconds(),
)


@contextmanager
def session(*, as_json: bool, quiet: bool, verbose: int) -> Iterator[Terminal]:
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
            terminal.fail(error)
            raise typer.Exit(exit_code(error)) from None


@contextmanager
def _logging(terminal: Terminal) -> Iterator[None]:
    """lowtide's own log lines, warnings and up unless `-q`, `-v` or `-vv` say otherwise, on stderr."""
    logger = logging.getLogger("lowtide")
    handler = RichHandler(console=terminal.err, show_time=False, show_path=False, markup=False)
    level = logger.level

    def remember(record: logging.LogRecord) -> bool:
        terminal.logged.add(record.getMessage())
        return True

    handler.addFilter(remember)
    logger.addHandler(handler)
    levels = (logging.WARNING, logging.INFO, logging.DEBUG)
    logger.setLevel(logging.ERROR if terminal.quiet else levels[min(terminal.verbose, 2)])
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
