"""Rows of a table that grows: dataclasses in a CSV, tables of Markdown, and the options of what adds rows."""

import argparse
import csv
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

R = TypeVar("R")

_KINDS = {"int": int, "float": float, "str": str}


def read(path: Path, kind: type[R]) -> list[R]:
    """The rows that `append` wrote; none where the file is not there."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [_from_text(kind, row) for row in csv.DictReader(file)]


def append(path: Path, row: Any) -> None:
    names = [field.name for field in fields(row)]
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, names)
        if is_new:
            writer.writeheader()
        writer.writerow({name: getattr(row, name) for name in names})


def markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *cells)]


def row_options(description: str | None, *, what: str, out: Path, limit: float) -> argparse.ArgumentParser:
    """The options of a program that adds one row for each of `what`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help=f"{what} whose name has this text")
    parser.add_argument("--out", type=Path, default=out, help="CSV that rows are added to")
    parser.add_argument("--limit", type=float, default=limit, help="seconds for one of them")
    parser.add_argument("--markdown", type=Path, help="write the table as a page, too")
    return parser


def _from_text(kind: type[R], row: dict[str, str]) -> R:
    types = {field.name: getattr(field.type, "__name__", str(field.type)) for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: _KINDS[type_name](row[name]) for name, type_name in types.items()})
