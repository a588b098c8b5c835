"""A process that is killed at any time costs the unsaved steps, as in eager, and leaves no file behind."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from killed_loop import EAGER, MODES
from training import differences

KILLS, STEPS = int(os.environ.get("LOWTIDE_KILLS", "12")), 60
"""Kills in each mode."""
LOOP = Path(__file__).parents[1] / "helpers" / "killed_loop.py"
MOST_LINES, MOST_SECONDS = 40, 0.05


@pytest.fixture(scope="module")
def server():
    command = [sys.executable, str(LOOP)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.stdin.close()


def run(server, folder, mode, *, kill=None, numbers=None):
    """What the loop was doing when it ended; `ended` where it came to its end."""
    print(f"{folder}|{mode}|{STEPS}", file=server.stdin, flush=True)
    process = int(server.stdout.readline().split()[1])
    left = numbers.randrange(1, MOST_LINES) if kill is not None else -1
    last = "start"
    for line in server.stdout:
        word = line.split()[0]
        if word == "over":
            return last
        last = word if word != "failed" else last
        left -= 1
        if left == 0:
            time.sleep(numbers.uniform(0.0, MOST_SECONDS))
            os.kill(process, kill)
    raise AssertionError("the server of the loops is gone")


def state(folder):
    found = torch.load(folder / "checkpoint.pt")
    assert found["steps"] == STEPS
    own = found["optimizer"]["state"]
    each = ((f"{key} of {name}", value) for name, values in own.items() for key, value in values.items())
    return sorted([*found["model"].items(), *each], key=lambda pair: pair[0])


@pytest.fixture(scope="module")
def expected(server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("eager")
    assert run(server, folder, EAGER) == "ended"
    return state(folder)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_killed_at_random_points_it_ends_where_eager_does(server, expected, tmp_path, mode, capsys):
    (tmp_path / "store").mkdir()
    numbers, killed = random.Random(mode), Counter()
    for number in range(KILLS):
        kill = (signal.SIGKILL, signal.SIGINT)[number % 2]
        word = run(server, tmp_path, mode, kill=kill, numbers=numbers)
        assert not list((tmp_path / "store").iterdir())
        if word == "ended":  # killed too late: begin anew
            (tmp_path / "checkpoint.pt").unlink()
        else:
            killed[kill.name, word] += 1
    with capsys.disabled():
        print(f"\n{mode}: {sum(killed.values())} of {KILLS} killed: {dict(killed)}")
    assert sum(killed.values()) > KILLS // 2
    assert run(server, tmp_path, mode) == "ended"
    assert not differences(expected, state(tmp_path))
