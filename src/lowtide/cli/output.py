"""Tables, and the folder that a command writes into."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryFile

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from lowtide.errors import LowtideError


class Dotted:
    """A dotted name in a cell, which goes over several lines only after its dots."""

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
    """The folder to write into, made if missing; files that are there are kept unless `force`.

    Asked before the work starts, so that nobody waits for minutes to learn it.
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
