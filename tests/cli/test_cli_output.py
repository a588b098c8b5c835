"""What a terminal shows: nothing twice, and nothing broken in the middle of a name."""

import io
import logging

import pytest
from rich.console import Console
from rich.text import Text

from lowtide.cli.terminal import Dotted, session, table


def test_modules_break_after_their_dots_on_a_narrow_terminal():
    console = Console(file=io.StringIO(), width=46)
    name = "transformer.layers.0.attention.dropout"
    why = "frees 2.0 MiB between ranks 129 and 532 for 0.17 ms: recomputed"
    console.print(table("x", ("name", "module", "why"), [("mul_2", Dotted(name), why)]))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 46
    cells = [line[8:30].split()[0] for line in text.splitlines() if "transf" in line or "." in line[8:24]]
    assert all(cell.endswith((".", "dropout")) for cell in cells) and len(cells) > 1


@pytest.mark.parametrize(("is_terminal", "times"), [(True, 0), (False, 1)])
def test_a_note_is_said_once(is_terminal, times):
    out, err = (Console(file=io.StringIO(), force_terminal=is_terminal, width=80) for _ in range(2))
    with session(as_json=False, quiet=False, verbose=False) as terminal:
        terminal.out, terminal.err = out, err
        logging.getLogger("lowtide.test").warning("busy: %d ops", 3)
        for _ in range(2):
            terminal.show(Text("note: busy: 3 ops"), Text("and the rest"))
    said = out.file.getvalue()
    assert said.count("busy: 3 ops") == times and said.count("and the rest") == 2
