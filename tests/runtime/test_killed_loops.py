"""A process that is killed at any time costs the unsaved steps, as in eager, and leaves no file behind."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from training import differences

KILLS, STEPS = int(os.environ.get("LOWTIDE_KILLS", "6")), 120
LOOP = Path(__file__).parents[1] / "helpers" / "killed_loop.py"


def run(folder, *, kill_after=None, eager=False):
    """Whether the loop came to its end."""
    command = [sys.executable, str(LOOP), str(folder), str(STEPS), *(["eager"] if eager else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if kill_after is not None and process.stdout.readline().startswith("step"):
            time.sleep(kill_after)
            process.send_signal(signal.SIGKILL)
        process.stdout.read()
    return process.returncode == 0


def state(folder):
    found = torch.load(folder / "checkpoint.pt")
    assert found["steps"] == STEPS
    own = found["optimizer"]["state"]
    return [
        *found["model"].items(),
        *((f"{key} of {name}", value) for name, values in own.items() for key, value in values.items()),
    ]


@pytest.mark.long
def test_killed_at_random_points_it_ends_where_eager_does(tmp_path):
    numbers = random.Random(0)
    eager, own = tmp_path / "eager", tmp_path / "own"
    for folder in (eager, own):
        (folder / "store").mkdir(parents=True)
    assert run(eager, eager=True)
    killed = sum(not run(own, kill_after=numbers.uniform(0.0, 1.5)) for _ in range(KILLS))
    assert killed, "no process was killed before its end"
    assert run(own)
    assert not differences(state(eager), state(own))
    assert not list((own / "store").iterdir())
