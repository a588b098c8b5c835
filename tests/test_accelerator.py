"""The cases of `tests/accelerator` on the stand-in accelerator, a few files in each process.

The stand-in replaces the CPU allocator of its process: no other test may run beside it.
"""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
FILES = sorted((HERE / "accelerator").glob("test_*.py"))
COMPILER = os.environ.get("CXX", "c++")


FIRST = ("command_line", "device", "library_workspaces", "reserved")
"""Files that look at all that a process has on its device: each begins a group. The others are dealt out."""


def groups() -> dict[str, list[Path]]:
    """The files of each process, by the first one's subject."""
    by_name = {file.stem.removeprefix("test_"): file for file in FILES}
    found = {name: [by_name.pop(name)] for name in FIRST}
    for number, file in enumerate(by_name.values()):
        found[FIRST[number % len(FIRST)]].append(file)
    return found


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"the stand-in needs a C++ compiler ({COMPILER})")
@pytest.mark.parametrize("group", groups())
def test_on_the_stand_in(group: str) -> None:
    paths = [str(HERE / "standin"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    env = {key: value for key, value in env.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-rs", "--no-header", "--show-capture=no"]
    done = subprocess.run(
        [*command, *map(str, groups()[group])],
        env=env,
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


REPORT = HERE / "accelerator" / "report.py"


def test_the_block_says_what_held_and_what_did_not() -> None:
    block = runpy.run_path(str(REPORT))["block"]
    case = {"subject": "exact", "name": "test_the_peak[cnn]", "outcome": "passed", "figures": [], "why": ""}
    cases = [
        case | {"figures": [(3 << 20, 3 << 20, 4 << 20)]},
        case | {"outcome": "failed", "figures": [(3 << 20, 5 << 20, 4 << 20)], "why": "differs"},
        case | {"outcome": "not run", "name": "", "why": "the file ended with status -11"},
    ]
    assert block(["device: a GPU"], cases, 61.4) == [
        "",
        "```",
        "lowtide on an accelerator",
        "device: a GPU",
        "FAILED   exact: the peak[cnn] | peak 3.00 predicted, 5.00 measured, 4.00 MiB budget OVER | differs",
        "NOT RUN  exact | the file ended with status -11",
        "held     exact: the peak[cnn] | peak 3.00 predicted, 3.00 measured, 4.00 MiB budget",
        "1 held, 1 failed, 1 not run, in 61 s",
        "```",
    ]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
def test_without_an_accelerator_there_is_one_line() -> None:
    done = subprocess.run([sys.executable, str(REPORT)], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("no accelerator: ") and len(done.stderr.splitlines()) == 1
