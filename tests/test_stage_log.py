"""One line about a result: to the log where that shows it, to stderr elsewhere, and never twice."""

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cli.terminal import session
from lowtide.stage_log import say, stage

OWN, ROOT = logging.getLogger("lowtide"), logging.getLogger()


@contextmanager
def logging_set(*, handler: bool, root: int, own: int = logging.NOTSET) -> Iterator[io.StringIO]:
    """Logging as a program sets it up, without pytest's own handlers; gives what the handler writes."""
    before = ROOT.handlers[:], ROOT.level, OWN.level
    written = io.StringIO()
    ROOT.handlers[:] = [logging.StreamHandler(written)] if handler else []
    ROOT.setLevel(root)
    OWN.setLevel(own)
    try:
        yield written
    finally:
        ROOT.handlers[:] = before[0]
        ROOT.setLevel(before[1])
        OWN.setLevel(before[2])


@pytest.mark.parametrize(
    ("handler", "root", "own", "where"),
    [
        (False, logging.WARNING, logging.NOTSET, "stderr"),
        (True, logging.WARNING, logging.NOTSET, "stderr"),
        (True, logging.INFO, logging.NOTSET, "log"),
        (True, logging.WARNING, logging.INFO, "log"),
        (False, logging.WARNING, logging.INFO, "stderr"),
        (True, logging.INFO, logging.WARNING, ""),
        (False, logging.WARNING, logging.WARNING, ""),
    ],
)
def test_a_line_is_seen_once_unless_the_program_wants_none(handler, root, own, where, capsys):
    with logging_set(handler=handler, root=root, own=own) as written:
        say("all is well")
    assert written.getvalue() == ("all is well\n" if where == "log" else "")
    assert capsys.readouterr() == ("", "lowtide: all is well\n" if where == "stderr" else "")


@pytest.mark.parametrize("handler", [False, True])
def test_a_warning_names_its_sender_where_the_program_has_no_handler(handler, capsys):
    with logging_set(handler=handler, root=logging.WARNING) as written:
        OWN.warning("too busy to time %d ops", 2)
    assert written.getvalue() == ("too busy to time 2 ops\n" if handler else "")
    assert capsys.readouterr().err == ("" if handler else "lowtide: too busy to time 2 ops\n")


def test_of_several_processes_the_first_speaks(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with logging_set(handler=False, root=logging.WARNING):
        say("all is well")
        OWN.warning("this rank alone")
    assert capsys.readouterr().err == "lowtide: this rank alone\n"


def test_a_terminal_breaks_no_word(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    with logging_set(handler=False, root=logging.WARNING):
        say("predicted peak 39.9 MiB of 40.3 MiB (67.2 MiB without a plan)")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "lowtide: predicted peak 39.9 MiB of 40.3",
        "         MiB (67.2 MiB without a plan)",
    ]


def test_disabled_logging_is_silence(capsys):
    with logging_set(handler=True, root=logging.DEBUG) as written:
        logging.disable(logging.INFO)
        try:
            say("all is well")
        finally:
            logging.disable(logging.NOTSET)
    assert written.getvalue() == "" and capsys.readouterr().err == ""


def test_a_command_says_nothing_of_it(capsys):
    with (
        logging_set(handler=False, root=logging.WARNING),
        session(as_json=False, quiet=False, verbose=False),
    ):
        say("all is well")
    assert capsys.readouterr().err == ""


def checkpointed(budget: str | int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
    return lowtide.checkpoint(model, torch.randn(512, 16), budget=budget)


def test_checkpoint_says_one_line(capsys):
    with logging_set(handler=False, root=logging.WARNING):
        plan = lowtide.plan_of(checkpointed("80%"))
        said = capsys.readouterr().err
        checkpointed("8G")
        fitting = capsys.readouterr().err
    assert said.count("\n") == fitting.count("\n") == 1
    assert said.startswith("lowtide: predicted peak ") and f"{plan.overhead:.1%} more time" in said
    assert "MiB without a plan)" in said and "for input_0 float32[512x16]" in said
    assert "of 8.0 GiB, fits without a plan, for" in fitting and "more time" not in fitting


@stage(
    "divide", given=lambda a, b: f"{a} by {b}", made=str, details=lambda result: [f"whole part {result // 1}"]
)
def divide(a: float, b: float) -> float:
    return a / b


@pytest.mark.parametrize(
    ("level", "lines"),
    [
        (logging.WARNING, []),
        (logging.INFO, ["divide: 3 by 2 -> 1.5 ("]),
        (logging.DEBUG, ["divide: 3 by 2", "divide: whole part 1.0", "divide: 3 by 2 -> 1.5 ("]),
    ],
)
def test_a_stage_says_what_went_in_and_what_came_out(level, lines, caplog):
    with caplog.at_level(level, "lowtide"):
        assert divide(3, 2) == 1.5
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(lines) and all(map(str.startswith, said, lines))


def test_a_stage_that_fails_says_so(caplog):
    with caplog.at_level(logging.INFO, "lowtide"), pytest.raises(ZeroDivisionError):
        divide(1, 0)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("divide: 1 by 0 -> ZeroDivisionError (")


def test_nothing_is_described_for_nobody():
    def fail(*_):
        raise AssertionError("nobody listens")

    with logging_set(handler=True, root=logging.WARNING):
        assert stage("divide", given=fail, made=fail, details=fail)(lambda: 7)() == 7


def test_the_log_follows_a_step_from_stage_to_stage(caplog):
    with caplog.at_level(logging.DEBUG, "lowtide"):
        plan = lowtide.plan_of(checkpointed("80%"))
    own = [record for record in caplog.records if record.name == "lowtide.stages"]
    ends = [record.getMessage() for record in own if record.levelno == logging.INFO]
    assert [line.partition(":")[0] for line in ends] == ["capture", "profile", "plan", "apply"]
    assert (
        ends[0].startswith("capture: a Sequential -> 1 graph, ") and "for input_0 float32[512x16]" in ends[0]
    )
    assert all(" -> " in line and line.endswith(" s)") for line in ends)
    decided = [record.getMessage() for record in own if "plan: RE" in record.getMessage()]
    assert len(decided) == len(plan.decisions) > 0
