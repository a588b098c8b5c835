"""The command line's frame: what goes where, exit codes, errors of one line."""

import json
import logging
import subprocess
import sys
from importlib.metadata import version

import pytest
import typer

from lowtide import __version__
from lowtide.cli.exit_codes import Exit
from lowtide.cli.terminal import Terminal, claim_folder, session, table
from lowtide.errors import BudgetTooSmall, FreshProcessError, LowtideError, TargetError
from lowtide.facts.sizes import BadSize
from lowtide.zoo import CATALOG


def test_version_and_help(run_lowtide):
    assert run_lowtide("--version") == (0, f"lowtide {__version__} (torch {version('torch')})\n", "")
    for arguments in ((), ("--help",), ("-h",)):
        code, out, err = run_lowtide(*arguments)
        assert code == 0 and "models" in out and err == ""


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["models"], ["models", "--json"]])
def test_answers_without_torch(arguments):
    code = (
        f"import sys; sys.argv = ['lowtide', *{arguments!r}]\n"
        "from lowtide.cli import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_python_m_lowtide():
    command = [sys.executable, "-m", "lowtide", "--version"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout == f"lowtide {__version__} (torch {version('torch')})\n"


@pytest.mark.parametrize("arguments", [("nope",), ("--nope",), ("models", "--nope"), ("models", "more")])
def test_usage_errors_are_one_line(run_lowtide, arguments):
    code, out, err = run_lowtide(*arguments)
    assert code == Exit.USAGE and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and "--help" in err


def test_models(run_lowtide):
    code, out, err = run_lowtide("models")
    assert code == 0 and err == ""
    assert all(name in out for name in CATALOG)
    code, out, err = run_lowtide("models", "--json")
    assert [entry["name"] for entry in json.loads(out)] == list(CATALOG) and err == ""


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (LowtideError("two\nlines"), Exit.ERROR, "error: two lines"),
        (TargetError("no such file: x.py"), Exit.ERROR, "error: no such file: x.py"),
        (BadSize("8 apples"), Exit.USAGE, "error: cannot read the size '8 apples'"),
        (
            BudgetTooSmall(budget_bytes=1, floor_bytes=2, node="n"),
            Exit.DOES_NOT_FIT,
            "error: cannot fit in 1",
        ),
        (MemoryError(), Exit.DOES_NOT_FIT, "error: out of memory: try a smaller batch"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
            Exit.DOES_NOT_FIT,
            "error: [enforce fail] DefaultCPUAllocator: can't allocate memory: try a smaller batch",
        ),
        (KeyboardInterrupt(), Exit.INTERRUPTED, "interrupted"),
        (ZeroDivisionError("oh"), Exit.ERROR, "error: ZeroDivisionError: oh (this should not happen"),
    ],
)
def test_errors_are_one_line_with_their_exit_code(capsys, error, code, line):
    with pytest.raises(typer.Exit) as caught, session(as_json=False, quiet=True, verbose=False):
        raise error
    out, err = capsys.readouterr()
    assert caught.value.exit_code == code and out == ""
    assert err.startswith(line) and err.count("\n") == 1


def test_verbose_shows_the_users_own_traceback(capsys):
    def factory():
        raise ValueError("deep inside")

    with pytest.raises(typer.Exit), session(as_json=False, quiet=False, verbose=True):
        try:
            factory()
        except ValueError as error:
            raise TargetError("the factory raised") from error
    err = capsys.readouterr().err
    assert "in factory" in err and "deep inside" in err
    assert err.splitlines()[-1] == "error: the factory raised"


def test_verbose_shows_what_a_fresh_process_said(capsys):
    with pytest.raises(typer.Exit), session(as_json=False, quiet=False, verbose=True):
        raise FreshProcessError("it failed", details="its own traceback")
    assert "its own traceback" in capsys.readouterr().err


def test_an_exit_passes_through(capsys):
    with pytest.raises(typer.Exit) as caught, session(as_json=False, quiet=False, verbose=False):
        raise typer.Exit(Exit.RESULTS_DIFFER)
    assert caught.value.exit_code == 4
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"quiet": True, "verbose": False}, {"error"}),
        ({"quiet": False, "verbose": False}, {"error", "warning"}),
        ({"quiet": False, "verbose": True}, {"error", "warning", "info"}),
    ],
)
def test_log_lines_go_to_stderr(capsys, options, shown):
    logger = logging.getLogger("lowtide.capture")
    before = logging.getLogger("lowtide").handlers[:]
    with session(as_json=False, **options):
        for level in ("error", "warning", "info"):
            getattr(logger, level)(f"about {level}")
    out, err = capsys.readouterr()
    assert out == ""
    assert {level for level in ("error", "warning", "info") if f"about {level}" in err} == shown
    assert logging.getLogger("lowtide").handlers == before


def test_data_and_tables_never_mix(capsys):
    for as_json in (True, False):
        terminal = Terminal(as_json=as_json)
        terminal.data({"a": 1})
        terminal.show("a table")
        out = capsys.readouterr().out
        assert (json.loads(out) == {"a": 1}) if as_json else (out == "a table\n")


def test_notes_are_for_stderr_and_not_for_quiet(capsys):
    Terminal().note("wrote [red]x[/red]")
    Terminal(quiet=True).note("wrote y")
    assert capsys.readouterr() == ("", "wrote [red]x[/red]\n")


def test_no_progress_where_nobody_looks(capsys):
    with Terminal().working("capturing"):
        pass
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("columns", ["40", "200"])
def test_names_are_kept_whole_at_any_width(monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", columns)
    name = "encoder.layers[0]." + "x" * 60
    Terminal().show(table("T", ("name", "bytes>"), [(name, "1.5 GiB")]))
    out = capsys.readouterr().out
    assert "1.5 GiB" in out and "\x1b" not in out
    assert max(map(len, out.splitlines())) <= int(columns)
    assert name in "".join(out.replace("1.5 GiB", "").split())


def test_a_file_that_is_there_is_kept_unless_forced(tmp_path):
    folder = tmp_path / "deep" / "out"
    assert claim_folder(None, ["profile.json"], force=False) is None
    assert claim_folder(folder, ["profile.json"], force=False) == folder
    (folder / "profile.json").write_text("{}")
    with pytest.raises(LowtideError, match=r"profile\.json is already there: say --force"):
        claim_folder(folder, ["profile.json"], force=False)
    assert claim_folder(folder, ["profile.json"], force=True) == folder
    assert claim_folder(folder, ["plan.json"], force=False) == folder


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LowtideError, match="cannot write into the folder"):
        claim_folder(tmp_path / "file" / "out", [], force=False)
