"""`--device`: figures for a GPU that is not here, each of which says that it is estimated."""

import json

import pytest

from lowtide.cli.exit_codes import Exit

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


@pytest.mark.parametrize(
    "arguments",
    [
        ("profile", "tiny-gpt2", "-b", "1"),
        ("plan", "tiny-gpt2", "-b", "1", "--budget", "90%"),
        ("run", "tiny-gpt2", "-b", "1", "--budget", "90%"),
        ("verify", "plan.json"),
        ("sweep", "tiny-gpt2", "-b", "1,2", "--budget", "90%"),
        ("compare", "tiny-gpt2", "-b", "1"),
        ("tradeoff", "tiny-gpt2", "-b", "1"),
        ("fit", "tiny-gpt2", "--budget", "1GiB"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_device_that_is_not_here_is_refused_before_any_work(run_lowtide, arguments):
    code, stdout, stderr = run_lowtide(*arguments, "--on", "xpu:7")
    assert code == Exit.USAGE and not stdout and len(stderr.splitlines()) == 1
    assert "no device 'xpu:7' here: this machine has cpu" in stderr


def test_a_device_of_this_machine_is_not_one_that_is_not_here(run_lowtide, target):
    arguments = ("plan", target, "-b", "4", "--budget", "90%", "--on", "cpu", "--device", "a100-40g")
    code, _, stderr = run_lowtide(*arguments)
    assert code == Exit.USAGE and "leave one of them out" in stderr
    code, _, stderr = run_lowtide("plan", "profile.json", "--budget", "90%", "--on", "cpu")
    assert code == Exit.USAGE and "--on is for a TARGET" in stderr


def test_an_estimated_plan_is_verified_where_the_gpu_is(run_lowtide, target, tmp_path):
    arguments = ("-b", "4", "--budget", "99%", "--device", "a100-40g", "-o", str(tmp_path), "-q")
    assert run_lowtide("plan", target, *arguments)[0] == 0
    code, _, stderr = run_lowtide("verify", str(tmp_path / "plan.json"))
    assert code == Exit.USAGE and "estimated for a100-40g" in stderr and "lowtide plan" in stderr


def test_on_the_cpu_by_name_is_the_same_step(run_lowtide, target, tmp_path):
    for folder, on in (("default", ()), ("named", ("--on", "cpu"))):
        assert run_lowtide("profile", target, "-b", "4", "-o", str(tmp_path / folder), "-q", *on)[0] == 0
    default, named = (
        json.loads((tmp_path / folder / "profile.json").read_text()) for folder in ("default", "named")
    )
    assert named["fingerprint"] == default["fingerprint"] and named["device"] == default["device"] == "cpu"
    assert (default["target"]["device"], named["target"]["device"]) == (None, "cpu")
