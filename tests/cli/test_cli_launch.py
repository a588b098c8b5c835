"""`lowtide launch`: an unmodified script trains inside a budget, with the same losses."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowtide.cli.app import app
from lowtide.cli.launch_command import misplaced, options_first

SCRIPT = """
import sys
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Sequential):
    pass


if __name__ == "__main__":
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(768, 16), torch.randint(4, (768,)))
    model = Net(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    print(sys.argv[1:], sys.modules["__main__"].Net is Net)
    for x, y in DataLoader(data, batch_size=256, shuffle=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(loss.item().hex())
"""
TAKES_VALUE = {"--budget": True, "-q": False}


def run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("launch")
    (made / "train.py").write_text(SCRIPT)
    return made


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train.py --budget 8 --epochs 3", "--budget 8 -- train.py --epochs 3"),
        ("--budget 8 train.py --epochs 3", "--budget 8 -- train.py --epochs 3"),
        ("-q train.py --budget=8 --epochs 3 --budget 2", "-q --budget=8 -- train.py --epochs 3 --budget 2"),
        ("--budget 8 -- train.py --budget 2", "--budget 8 -- train.py --budget 2"),
        ("train.py --budget 8 -- --budget 2", "--budget 8 -- train.py --budget 2"),
        ("train.py", "-- train.py"),
        ("--budget 8", "--budget 8"),
    ],
)
def test_options_stand_before_the_script_or_right_behind_it(words, expected):
    assert options_first(words.split(), TAKES_VALUE) == expected.split()


@pytest.mark.slow
def test_a_script_trains_inside_a_budget_with_the_same_losses(folder):
    eager = run("train.py", "--epochs", "1", folder=folder)
    planned = run("-m", "lowtide", "launch", "train.py", "--budget", "90%", "--epochs", "1", folder=folder)
    assert planned.returncode == eager.returncode == 0, planned.stderr
    assert planned.stdout == eager.stdout and "['--epochs', '1'] True" in eager.stdout
    assert "predicted peak" in planned.stderr and "nothing was planned" not in planned.stderr


def test_a_budget_that_cannot_be_met_ends_the_script_before_its_first_step(folder):
    refused = run("-m", "lowtide", "launch", "train.py", "--budget", "20KiB", folder=folder)
    assert refused.returncode == 3 and "0x" not in refused.stdout
    assert "lowtide: error: cannot fit in 20.0 KiB" in refused.stderr and "Traceback" not in refused.stderr
    assert (
        "lowest reachable peak with\n" in refused.stderr
        and " holds_outputs=False (in Python)\n" in refused.stderr
    )
    assert "nothing was planned" not in refused.stderr


def test_a_script_that_trains_nothing_is_told_so_and_fails_by_itself(folder):
    (folder / "fails.py").write_text("print('begins')\nraise ZeroDivisionError('its own')\n")
    failed = run("-m", "lowtide", "launch", "fails.py", "--budget", "1GiB", folder=folder)
    assert failed.returncode == 1 and failed.stdout == "begins\n"
    assert "ZeroDivisionError: its own" in failed.stderr and "lowtide: nothing was planned" in failed.stderr
    assert "fails.py" in failed.stderr and "typer" not in failed.stderr and "runpy" not in failed.stderr


def test_an_interrupt_while_the_model_is_planned_is_one_line(folder, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("lowtide.api.checkpoint", interrupt)
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr(sys, "path", sys.path[:])
    result = CliRunner().invoke(app, ["launch", str(folder / "train.py"), "--budget", "90%"])
    assert result.exit_code == 130 and result.stderr.strip() == "lowtide: interrupted"


def test_a_script_that_compiles_its_step_is_told_why_no_model_was_seen(folder):
    (folder / "compiled.py").write_text(
        "import torch\nmodel = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "@torch.compile(backend='eager')\ndef step(x):\n    return model(x).sum()\n"
        "step(torch.randn(2, 4)).backward()\n"
    )
    done = run("-m", "lowtide", "launch", "compiled.py", "--budget", "1GiB", folder=folder)
    assert done.returncode == 0 and "inside of a function of torch.compile is not seen" in done.stderr


def test_a_script_that_python_cannot_read_is_named_without_frames_of_this_command(folder):
    (folder / "unread.py").write_text("print(\n")
    failed = run("-m", "lowtide", "launch", "unread.py", folder=folder)
    assert failed.returncode == 1 and 'unread.py", line 1' in failed.stderr and "typer" not in failed.stderr


def test_running_out_of_memory_is_explained_below_the_scripts_own_error(folder):
    (folder / "full.py").write_text(SCRIPT + '    raise MemoryError("its own")\n')
    failed = run("-m", "lowtide", "launch", "full.py", folder=folder)
    assert (
        failed.returncode == 1
        and "MemoryError: its own\nlowtide: the model trains by a plan" in failed.stderr
    )


def test_a_missing_script_is_named(folder):
    missing = run("-m", "lowtide", "launch", "absent.py", "--budget", "1GiB", folder=folder)
    assert missing.returncode == 2 and "there is no file absent.py" in missing.stderr


def test_arguments_that_may_be_meant_for_launch_are_noted() -> None:
    options = ("--budget", "--reserve", "--planner", "-m")
    said = list(misplaced(["--epochs", "3", "--budegt", "70%", "--budget=8GiB", "-m"], options))
    assert len(said) == 2
    assert said[0] == "--budegt goes to the script (lowtide has --budget)"
    assert said[1].startswith("--budget goes to the script, as it stands behind the script's own")
    assert not list(misplaced(["--budge-the-lr", "--lr", "0.1"], options))
