"""`--device`: figures for a GPU that is not here, each of which says that it is estimated."""

import json

import pytest

from lowtide.cli.terminal import Exit

pytestmark = pytest.mark.slow

FACTORY = """
import torch
from torch import nn

def make(batch_size):
    layers = [nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 1)]
    return nn.Sequential(*layers), torch.randn(256 * batch_size, 64)
"""


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(FACTORY)
    return f"{path}:make"


def test_a_profile_its_file_and_a_plan_say_that_they_are_estimated(run_lowtide, target, tmp_path):
    out = tmp_path / "out"
    arguments = ("profile", target, "-b", "4", "--device", "a100-40g", "-o", str(out), "-q")
    code, stdout, _ = run_lowtide(*arguments)
    assert code == 0
    assert "on a100-40g (estimated): peak" in " ".join(stdout.split())
    assert "note: estimated for an NVIDIA A100 40 GB" in stdout
    assert "too large to time here" not in stdout
    code, stdout, _ = run_lowtide("plan", str(out / "profile.json"), "--budget", "97%", "--json", "-q")
    data = json.loads(stdout)
    assert code == 0 and data["device"] == "a100-40g (estimated)"
    assert any("should reserve" in note for note in data["notes"])
    assert data["peak_bytes"] <= data["budget_bytes"]
    code, stdout, stderr = run_lowtide("plan", target, "-b", "4", "--budget", "99%", "--device", "h100-80g")
    assert code == 0 and "h100-80g (estimated)" in stdout and "lowtide verify" not in stderr


def test_fit_estimates_and_trains_nothing(run_lowtide, target):
    arguments = ("fit", target, "--budget", "30MiB", "--device", "t4-16g", "--most", "4", "--json", "-q")
    code, stdout, _ = run_lowtide(*arguments)
    data = json.loads(stdout)
    assert code == 0 and data["device"] == "t4-16g (estimated)"
    assert data["largest"] == 4 and data["checks"] == []


def test_a_curve_is_estimated_and_nothing_of_it_measured(run_lowtide, target, tmp_path):
    out = tmp_path / "curve"
    arguments = ("tradeoff", target, "-b", "4", "--points", "3", "--device", "L4-24G", "-o", str(out), "-q")
    code, stdout, _ = run_lowtide(*arguments)
    data = json.loads((out / "tradeoff.json").read_text())
    assert code == 0 and "on l4-24g (estimated)" in " ".join(stdout.split())
    assert data["device"] == "l4-24g (estimated)"
    assert all(point["measured_peak_bytes"] is None for point in data["points"])
    assert "estimated: nothing was measured" in (out / "report.html").read_text()


def test_what_makes_no_sense_is_said(run_lowtide, target):
    code, _, stderr = run_lowtide("plan", target, "-b", "4", "--budget", "90%", "--device", "a100")
    assert code == Exit.USAGE and "choose one of a100-40g" in stderr
    code, _, stderr = run_lowtide("profile", target, "-b", "4", "--device", "a100-40g", "--mode", "run")
    assert code == Exit.USAGE and "not on the a100-40g" in stderr
