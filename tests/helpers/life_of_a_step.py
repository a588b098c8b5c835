"""The life of one training step: the files of lowtide that it visits, in the order of the first visit.

    python tests/helpers/life_of_a_step.py          # the table
    python tests/helpers/life_of_a_step.py --write  # the table, into docs/architecture.md

A small model is planned and trained for two steps, and `sys.setprofile` sees every call of a function. All
modules are imported before, so that no import counts as a visit.
"""

import ast
import importlib
import os
import pkgutil
import re
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import lowtide

PACKAGE = Path(lowtide.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
BEGIN, END = "<!-- life-of-a-step: begin -->", "<!-- life-of-a-step: end -->"


class Net(nn.Module):
    """Has what most models have: products, a norm, dropout, and a sum around them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.norm, self.dropout = nn.LayerNorm(64), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.norm(x + self.dropout(self.down(torch.relu(self.up(x)))))
        return x


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def import_all() -> None:
    for module in pkgutil.walk_packages([str(PACKAGE)], "lowtide."):
        if not re.search(r"integrations\.|__main__|\.child$", module.name):
            importlib.import_module(module.name)


def visited() -> list[str]:
    """Files below `src/lowtide`, in the order in which the step first calls one of their functions."""
    import_all()
    found: dict[str, None] = {}
    prefix = f"{PACKAGE}/"

    def see(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(prefix) and frame.f_code.co_name != "<module>":
            found.setdefault(path.removeprefix(prefix))

    model, x = Net(), torch.randn(256, 64)
    optimizer = torch.optim.Adam(model.parameters())
    threading.setprofile(see)
    sys.setprofile(see)
    try:
        model = lowtide.checkpoint(model, x, budget="60%", optimizer=optimizer, loss=loss)
        for _ in range(2):
            optimizer.zero_grad()
            loss(model(x)).backward()
            optimizer.step()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(found)


def room_of(path: str) -> str:
    return path.split("/", maxsplit=1)[0] if "/" in path else "lowtide"


def stays(files: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Rooms in the order in which they are entered, each with the files that are new then."""
    for room, group in groupby(files, key=room_of):
        yield room, list(group)


def purpose(path: str) -> str:
    """The first sentence of a file's docstring, on one line."""
    text = ast.get_docstring(ast.parse((PACKAGE / path).read_text())) or ""
    return re.split(r"(?<=\.)\s|\n\n", text, maxsplit=1)[0].replace("\n", " ").strip()


def section(files: list[str]) -> str:
    """What stands between the marks of the page."""
    entered = list(stays(files))
    rooms = {room for room, _ in entered}
    lines = [
        f"{len(files)} files in {len(rooms)} rooms; the step enters rooms {len(entered)} times:",
        "",
        "| room | file | what it does |",
        "|---|---|---|",
    ]
    for room, group in entered:
        for number, path in enumerate(group):
            lines.append(f"| {'' if number else f'`{room}`'} | `{path}` | {purpose(path)} |")
    return "\n".join(lines)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LOWTIDE_CACHE_DIR"] = folder  # costs from earlier runs would shorten the way
        text = section(visited())
    if "--write" not in sys.argv:
        print(text)
        return
    page = PAGE.read_text()
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    main()
