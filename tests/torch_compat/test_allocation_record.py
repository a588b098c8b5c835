"""Measuring writes nothing to stderr, whatever the log level of torch's newer profiler is."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
when, level = sys.argv[1:]
if when == "before":
    os.environ["KINETO_LOG_LEVEL"] = level
import torch, lowtide
from lowtide.torch_compat.allocation_record import AllocationRecord, profiler_events
if when == "after":
    os.environ["KINETO_LOG_LEVEL"] = level
profiler_events(lambda: torch.ones(3) + 1)
record = AllocationRecord(lambda: None)
assert record.start()
torch.ones(3) + 1
record.stop()
model = torch.nn.Linear(4, 4)
lowtide.profile(model, torch.ones(2, 4), cache=False)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(("when", "level"), [("before", "5"), ("after", "0")])
def test_no_line_of_kineto_comes_through(when: str, level: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, when, level], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "USDT" not in done.stdout + done.stderr and ".cpp:" not in done.stdout + done.stderr
