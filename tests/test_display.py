"""The line on a terminal: there while the library works, and gone afterwards, however that ends."""

import io
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import pytest
import torch
from torch import nn

import lowtide
from lowtide import display
from lowtide.cli.terminal import session

pytestmark = pytest.mark.slow

SHOW_CURSOR = "\x1b[?25h"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def terminal() -> Iterator[Screen]:
    """A terminal as stderr. No fixture: pytest puts its own stderr back between those and the test."""
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(Screen()) as screen:
        patch.setenv("TERM", "xterm")
        yield screen


def checkpoint() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    lowtide.checkpoint(model, torch.randn(4, 8), budget="200%")


def test_a_terminal_shows_all_stages_in_turn() -> None:
    with terminal() as screen:
        checkpoint()
    text = screen.getvalue()
    places = [text.index(stage) for stage in ("capturing the step", "measuring its ops")]
    assert places == sorted(places)
    assert text.rindex(SHOW_CURSOR) > text.rindex("measuring its ops")
    assert not display._current


def test_no_progress_is_shown_where_nobody_looks(capfd) -> None:
    checkpoint()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("lowtide: predicted peak ")


def test_an_interrupted_one_leaves_a_clean_line() -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with terminal() as screen, pytest.raises(KeyboardInterrupt), display.shown() as line:
        line.stage("planning")
        interrupt(1, 2)
    assert screen.getvalue().rindex(SHOW_CURSOR) > screen.getvalue().rindex("planning")
    assert not display._current


def test_who_asks_for_the_progress_gets_it_instead() -> None:
    told = []
    with terminal() as screen:
        lowtide.profile(
            nn.Linear(8, 1),
            torch.randn(4, 8),
            cache=False,
            progress=lambda done, total: told.append((done, total)),
        )
    assert told[-1][0] == told[-1][1]
    assert screen.getvalue() == ""


def test_a_command_shows_its_own_line_alone() -> None:
    with terminal() as screen, session(as_json=False, quiet=True, verbose=False):
        checkpoint()
    assert screen.getvalue() == ""


def test_a_notebook_has_a_line_that_goes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    class ZMQInteractiveShell:
        pass

    kernel = types.SimpleNamespace(get_ipython=ZMQInteractiveShell)
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    with display.shown() as line:
        line.stage("measuring")
        for done in range(1, 100):
            line.count(done, 99)
    said = capsys.readouterr().err
    assert "measuring 99/99" in said and said.count("measuring") < 40, "not once for every op"
    assert said.endswith(" \r"), "nothing stays"


def test_no_notebook_no_line(capsys: pytest.CaptureFixture) -> None:
    with display.shown() as line:
        line.stage("measuring")
    assert capsys.readouterr().err == ""
