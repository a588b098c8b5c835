import logging
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lowtide.errors import LowtideError, UnsupportedTorch
from lowtide.torch_compat import CHECKED_TORCH, NEWEST, OLDEST, REQUIREMENT, check_version

ROOT = Path(__file__).parent.parent.parent

PRETEND = "import torch; torch.__version__ = '{}'; "
LOOK_TWICE = "import lowtide; lowtide.profile, lowtide.load_plan, lowtide.remove"
ARGUMENTS = ("plan", "tiny-gpt2", "--batch-size", "2", "--budget", "1B")


def run_with(version, code, *arguments):
    command = [sys.executable, "-c", PRETEND.format(version) + code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("found", ["2.12.1", "2.9.0", "1.13.1+cpu", "2.12.0a0+git1234"])
def test_older_torch_is_refused_in_one_line(found):
    with pytest.raises(UnsupportedTorch) as caught:
        check_version(found)
    message = str(caught.value)
    assert found in message and f"pip install '{REQUIREMENT}'" in message and "\n" not in message
    assert isinstance(caught.value, LowtideError) and isinstance(caught.value, ImportError)


@pytest.mark.parametrize("found", ["2.16.0", "2.16.0.dev20270101+cpu", "3.0.1", "custom"])
def test_newer_torch_is_warned_of_in_one_line(found, caplog):
    check_version(found)
    [record] = caplog.records
    assert (record.levelno, record.name) == (logging.WARNING, "lowtide")
    assert f"this is torch {found}" in record.getMessage() and "\n" not in record.getMessage()


@pytest.mark.parametrize("found", [*CHECKED_TORCH, "2.13.0+cpu", "2.13.1", "2.14.0+cu130", "2.15.7"])
def test_torch_within_the_range_says_nothing(found, caplog):
    check_version(found)
    assert caplog.records == []


def test_the_library_refuses_older_torch_before_it_reaches_into_it():
    code, stderr = run_with("2.12.1", LOOK_TWICE)
    assert code == 1
    assert stderr.splitlines()[-1].startswith("lowtide.errors.UnsupportedTorch: lowtide needs torch 2.13")


def test_the_command_refuses_older_torch_in_one_line():
    code, stderr = run_with("2.12.1", "import lowtide.__main__", *ARGUMENTS)
    assert code == 1
    assert [line for line in stderr.splitlines() if line.startswith("error:")] == stderr.splitlines()
    assert "this is torch 2.12.1" in stderr


def test_newer_torch_is_warned_of_once_per_process():
    code, stderr = run_with("2.16.0", LOOK_TWICE)
    assert code == 0
    assert stderr.count("this is torch 2.16.0") == len(stderr.splitlines()) == 1


def test_the_range_is_written_alike_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [one for one in project["dependencies"] if one.startswith("torch")] == [REQUIREMENT]
    after_newest = (NEWEST[0], NEWEST[1] + 1)
    assert "torch>={}.{},<{}.{}".format(*OLDEST, *after_newest) == REQUIREMENT
    minors = [tuple(map(int, checked.split(".")[:2])) for checked in CHECKED_TORCH]
    assert (minors[0], minors[-1]) == (OLDEST, NEWEST)


def test_the_makefile_installs_a_checked_version():
    [line] = [one for one in (ROOT / "Makefile").read_text().splitlines() if one.startswith("TORCH ?=")]
    assert line.removeprefix("TORCH ?= torch==") in CHECKED_TORCH
