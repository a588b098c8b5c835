"""`lowtide profile`, `verify` and `run` on a small model of the user's own."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowtide import verification
from lowtide.cli.exits import Exit
from lowtide.cli.files import load_plan, load_profile
from lowtide.cli.results import verdict, verification_exit
from lowtide.targets import TargetSpec
from lowtide.verification import Verification

USERS_FILE = """
import torch
from torch import nn

def make(batch_size):
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
    model = nn.Sequential(*layers, nn.Linear(64, 8))
    return model, torch.randn(batch_size, 64), torch.optim.SGD(model.parameters(), lr=0.1)

def broken(batch_size):
    class Broken(nn.Module):
        def forward(self, x):
            raise ValueError("my own mistake")
    return Broken(), torch.randn(batch_size, 64)

def raises(batch_size):
    raise RuntimeError("no data here")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("users")
    (path / "users_model.py").write_text(USERS_FILE)
    return path


@pytest.fixture(autouse=True)
def here(folder, monkeypatch, tmp_path_factory):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def ran(folder, tmp_path_factory):
    """`lowtide run` once, in a process of its own, for all tests to look at."""
    out = folder / "out"
    command = [sys.executable, "-m", "lowtide", "run", "users_model.py:make", "-b", "512", "--budget", "75%"]
    command += ["-o", str(out), "--json", "--timed-runs", "2"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path_factory.getbasetemp() / "cache")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout), done.stderr


def test_run_fits_and_is_exact(ran):
    _, data, _ = ran
    result = data["verification"]
    assert result["exact"] and result["differences"] == [] and result["fresh_process"]
    assert result["measured_peak_bytes"] <= result["budget_bytes"] < result["baseline_predicted_peak_bytes"]
    assert data["plan"]["num_recomputed"] > 0


def test_run_leaves_everything_in_its_folder(ran):
    out, data, stderr = ran
    names = {"profile.json", "plan.json", "verification.json", "report.html", "trace.json", "plots"}
    names |= {"node_stats.csv", "activation_stats.csv", "ac_decisions.csv", "tradeoff.csv"}
    assert {path.name for path in out.iterdir()} == names
    assert all(Path(path).exists() for path in data["files"])
    spec = TargetSpec(text="users_model.py:make", batch_size=512)
    profile, profiled = load_profile(out / "profile.json")
    plan, planned = load_plan(out / "plan.json")
    assert profiled == planned == spec
    assert plan.baseline_peak_bytes == profile.peak_bytes == data["profile"]["peak_bytes"]
    with (out / "node_stats.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(profile.nodes)
    assert f"report: {out / 'report.html'}" in stderr and "next: lowtide plan" in stderr


def test_a_plan_from_the_files_of_a_run(ran, run_lowtide):
    out, data, _ = ran
    code, stdout, _ = run_lowtide("plan", str(out / "profile.json"), "--budget", "75%", "--json")
    assert code == 0
    assert json.loads(stdout)["decisions"] == data["plan"]["decisions"]


@pytest.mark.parametrize(
    ("changes", "code"), [({}, Exit.DONE), ({"exact": False, "differences": ("loss",)}, Exit.RESULTS_DIFFER)]
)
def test_verify_a_plan_from_its_file(ran, run_lowtide, monkeypatch, tmp_path, changes, code):
    out, _, _ = ran
    asked = []

    def verify(source, plan, *, timed_runs):
        asked.append((source, plan.solution, timed_runs))
        return result_with(**changes)

    monkeypatch.setattr(verification, "verify", verify)
    found, stdout, stderr = run_lowtide(
        "verify", str(out / "plan.json"), "--timed-runs", "3", "-o", str(tmp_path)
    )
    plan, spec = load_plan(out / "plan.json")
    assert asked == [(spec, plan.solution, 3)]
    assert found == code and "users_model.py:make" in stdout and "verification.json" in stderr
    assert json.loads((tmp_path / "verification.json").read_text())["exact"] is (code == Exit.DONE)


def test_verify_needs_to_know_the_target(ran, run_lowtide, tmp_path):
    out, _, _ = ran
    plan, _ = load_plan(out / "plan.json")
    plan.save(tmp_path / "plan.json")
    code, _, stderr = run_lowtide("verify", str(tmp_path / "plan.json"))
    assert code == Exit.ERROR and "does not say what it was made for" in stderr


def test_run_does_not_replace_a_run(ran, run_lowtide):
    out, _, _ = ran
    code, _, stderr = run_lowtide(
        "run", "users_model.py:make", "-b", "512", "--budget", "75%", "-o", str(out)
    )
    assert code == Exit.ERROR and "--force" in stderr


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("missing.py:make", "no such file: missing.py"),
        ("users_model.py:nothing", "no factory 'nothing' in users_model.py; there are make, broken, raises"),
        ("users_model.py:raises", "raised RuntimeError: no data here (users_model.py:17)"),
        ("users_model.py:broken", "my own mistake"),
        ("tiny-berd-base", "did you mean 'tiny-bert-base'?"),
    ],
)
def test_target_errors_are_told_apart_in_one_line(run_lowtide, target, message):
    code, stdout, stderr = run_lowtide("profile", target, "-b", "2", "-o", "errors")
    assert code == Exit.ERROR and stdout == ""
    assert stderr.startswith("error: ") and message in stderr and stderr.count("\n") == 1


def test_verbose_shows_the_users_own_traceback(run_lowtide):
    _, _, stderr = run_lowtide("profile", "users_model.py:raises", "-b", "2", "-v")
    assert 'users_model.py", line 17, in raises' in stderr


def test_a_target_needs_a_batch_size(run_lowtide):
    code, _, stderr = run_lowtide("plan", "users_model.py:make", "--budget", "60%")
    assert code == Exit.ERROR and "Say --batch-size N" in stderr


def test_interrupted_leaves_no_half_written_files(folder):
    (folder / "slow_model.py").write_text("import time\ndef make(n):\n    print('on')\n    time.sleep(60)\n")
    out = folder / "interrupted"
    command = [
        sys.executable,
        "-u",
        "-m",
        "lowtide",
        "run",
        "slow_model.py:make",
        "-b",
        "2",
        "--budget",
        "60%",
    ]
    process = subprocess.Popen(
        [*command, "-o", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "on\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == Exit.INTERRUPTED and stderr == "interrupted\n"
    assert list(out.iterdir()) == []


def result_with(**changes):
    fields = {
        "exact": True,
        "differences": (),
        "eager_difference": "",
        "budget_bytes": 100,
        "predicted_peak_bytes": 90,
        "measured_peak_bytes": 90,
        "resident_peak_bytes": 90,
        "baseline_predicted_peak_bytes": 200,
        "baseline_measured_peak_bytes": 200,
        "baseline_resident_peak_bytes": 200,
        "step_timing": None,
        "baseline_step_timing": None,
        "fresh_process": True,
    }
    return Verification(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({}, Exit.DONE, "equal to the last bit"),
        ({"measured_peak_bytes": 101}, Exit.DOES_NOT_FIT, "ABOVE the budget"),
        ({"exact": False, "differences": ("loss, step 1",)}, Exit.RESULTS_DIFFER, "loss, step 1"),
        ({"fresh_process": False}, Exit.DONE, "measured in this process"),
        ({"eager_difference": "gradient of x"}, Exit.DONE, "eager first differs at gradient of x"),
    ],
)
def test_what_a_verification_says(changes, code, words):
    result = result_with(**changes)
    assert verification_exit(result) == code
    assert words in "\n".join(verdict(result))
