"""`lowtide profile`, `verify` and `run` on a small model of the user's own."""

import csv
import importlib
import io
import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from budgets import between
from rich.console import Console

from lowtide.api import profile
from lowtide.cli.exit_codes import Exit
from lowtide.cli.output_files import load_plan, load_profile
from lowtide.cli.tables import outcome_data, outcome_exit, outcome_tables, verdict
from lowtide.errors import BudgetTooSmall, FreshProcessError
from lowtide.experiments import machine, measured
from lowtide.experiments.measured import Outcome
from lowtide.profiles import Profile
from lowtide.verification import measure_step, verify_plan
from lowtide.verification.measure_step import Timing
from lowtide.verification.verdict import measurement_of
from lowtide.verification.verify_plan import Verification
from lowtide.zoo.targets import TargetSpec, load_target

pytestmark = pytest.mark.slow

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

BEFORE_VERIFYING = {"profile.json", "plan.json", "node_stats.csv", "activation_stats.csv", "ac_decisions.csv"}
REPORTED = {"verification.json", "report.html", "trace.json", "tradeoff.csv", "plots"}


def names_in(folder):
    return {path.name for path in folder.iterdir()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("users")
    (path / "users_model.py").write_text(USERS_FILE)
    return path


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)


@pytest.fixture(scope="module")
def budget(folder):
    """Bytes that a plan for the user's model reaches, half-way between its floor and its peak."""
    target = load_target(f"{folder / 'users_model.py'}:make", batch_size=512)
    found = profile(target.model, target.batch, optimizer=target.optimizer)
    return str(between(found, 0.5))


@pytest.fixture(scope="module")
def ran(folder, budget):
    """`lowtide run` once, in a process of its own, for all tests to look at."""
    out = folder / "out"
    command = [sys.executable, "-m", "lowtide", "run", "users_model.py:make", "-b", "512", "--budget", budget]
    command += ["-o", str(out), "--json", "--timed-runs", "2"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
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
    assert names_in(out) == BEFORE_VERIFYING | REPORTED
    assert all(Path(path).exists() for path in data["files"])
    spec = TargetSpec(text="users_model.py:make", batch_size=512)
    profile, profiled = load_profile(out / "profile.json")
    plan, planned = load_plan(out / "plan.json")
    assert profiled == planned == spec
    assert plan.baseline_peak_bytes == profile.peak_bytes == data["profile"]["peak_bytes"]
    with (out / "node_stats.csv").open() as file:
        assert len(list(csv.DictReader(file))) == sum(not node.on_demand for node in profile.nodes)
    assert f"report: {out / 'report.html'}" in stderr and "next: lowtide plan" in stderr


def test_a_plan_from_the_files_of_a_run(ran, run_lowtide, budget):
    out, data, _ = ran
    code, stdout, _ = run_lowtide("plan", str(out / "profile.json"), "--budget", budget, "--json")
    assert code == 0
    assert json.loads(stdout)["decisions"] == data["plan"]["decisions"]


@pytest.mark.parametrize(
    ("changes", "code"), [({}, Exit.DONE), ({"exact": False, "differences": ("loss",)}, Exit.RESULTS_DIFFER)]
)
def test_verify_a_plan_from_its_file(ran, run_lowtide, monkeypatch, tmp_path, changes, code):
    out, _, _ = ran
    asked = []

    def verify(source, plan, *, timed_runs, resident):
        assert resident  # both methods, since one plan is asked about
        asked.append((source, plan.solution, timed_runs))
        return result_with(**changes)

    monkeypatch.setattr(verify_plan, "verify", verify)
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


def test_run_with_a_budget_that_cannot_be_met_leaves_the_profile(run_lowtide, tmp_path):
    out = tmp_path / "my out"
    arguments = ("run", "users_model.py:make", "-b", "512", "--budget", "1KiB", "-o", str(out))
    code, _, stderr = run_lowtide(*arguments)
    assert code == Exit.DOES_NOT_FIT
    files = {"profile.json", "node_stats.csv", "activation_stats.csv", "report.html"}
    assert {p.name for p in out.iterdir()} == files
    wrote, report, error, *_, lever, command = stderr.splitlines()
    assert str(out / "profile.json") in wrote and report == f"report: {out / 'report.html'}"
    assert error.startswith("error: cannot fit in 1.0 KiB (1024 bytes)")
    page = (out / "report.html").read_text()
    assert "no plan fits 1.0 KiB" in page and "Does not fit: " in page and "half the batch" in page
    code, stdout, _ = run_lowtide(*shlex.split(command.strip())[1:])
    assert code == 0 and "predicted peak" in stdout and (out / "plan.json").exists()
    words = shlex.split(lever.removeprefix("next: "), comments=True)
    assert words[:2] == ["lowtide", "run"] and words[-1] == "--force"
    assert {"--step-in-backward", "--offload"} & set(words)
    assert words[words.index("--budget") + 1] != "1KiB"


def test_a_refusal_in_json_is_one_value_with_its_figures(run_lowtide):
    code, stdout, stderr = run_lowtide(
        "plan", "users_model.py:make", "-b", "512", "--budget", "1KiB", "--json"
    )
    error = json.loads(stdout)["error"]
    assert code == Exit.DOES_NOT_FIT and "error: cannot fit" in stderr
    assert (error["type"], error["budget_bytes"]) == ("BudgetTooSmall", 1024)
    floors = [lever["floor_bytes"] for lever in error["levers"]]
    assert floors and max(floors) < error["floor_bytes"]


@pytest.mark.parametrize(
    ("arguments", "kind", "code"),
    [
        (("plan", "nowhere.py:make", "-b", "2", "--budget", "60%"), "TargetError", Exit.ERROR),
        (("plan", "users_model.py:make", "-b", "two", "--budget", "60%"), "UsageError", Exit.USAGE),
        (("plan", "users_model.py:make", "-b", "2", "--budget", "lots"), "UsageError", Exit.USAGE),
    ],
)
def test_every_failure_in_json_is_one_value(run_lowtide, arguments, kind, code):
    found, stdout, stderr = run_lowtide(*arguments, "--json")
    error = json.loads(stdout)["error"]
    assert (found, error["type"]) == (code, kind)
    assert error["message"] in stderr


@pytest.mark.parametrize(("command", "wanted"), [("verify", "a plan"), ("explain", "a plan")])
def test_a_profile_in_place_of_a_plan_is_called_so(run_lowtide, ran, command, wanted):
    out, _, _ = ran
    more = ("relu",) if command == "explain" else ()
    code, _, stderr = run_lowtide(command, str(out / "profile.json"), *more)
    assert code == Exit.ERROR
    assert f"'{out / 'profile.json'}' is a profile, and {wanted} is wanted" in stderr


@pytest.mark.parametrize(("floor_bytes", "budget"), [(500, "60%"), (601, "601"), (123 << 20, "123MiB")])
def test_profile_suggests_a_budget_that_can_be_met(run_lowtide, monkeypatch, tmp_path, floor_bytes, budget):
    monkeypatch.setattr(Profile, "floor_bytes", floor_bytes)
    monkeypatch.setattr(Profile, "peak_bytes", 1000)
    arguments = ("profile", "users_model.py:make", "-b", "2", "-o", str(tmp_path))
    code, _, stderr = run_lowtide(*arguments)
    assert code == 0
    assert f"next: lowtide plan {tmp_path / 'profile.json'} --budget {budget} -o {tmp_path}\n" in stderr


def test_run_does_not_replace_a_run(ran, run_lowtide, budget):
    out, _, _ = ran
    code, _, stderr = run_lowtide(
        "run", "users_model.py:make", "-b", "512", "--budget", budget, "-o", str(out)
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
    # tests that a shell runs in the background ignore Ctrl-C, and so would what they start
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [*command, "-o", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    signal.signal(signal.SIGINT, before)
    assert process.stderr is not None
    assert process.stderr.readline() == "on\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == Exit.INTERRUPTED and stderr == "interrupted\n"
    assert list(out.iterdir()) == []


def result_with(**changes):
    fields = {
        "exact": True,
        "differences": (),
        "recompute_exact": True,
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
        ({}, Exit.DONE, "equal to eager training to the last bit"),
        ({"measured_peak_bytes": 101}, Exit.DOES_NOT_FIT, "ABOVE the budget"),
        ({"exact": False, "differences": ("loss, step 1",)}, Exit.RESULTS_DIFFER, "loss, step 1"),
        ({"fresh_process": False}, Exit.DONE, "measured in this process"),
        ({"exact": False, "differences": ("loss",)}, Exit.RESULTS_DIFFER, "without any recompute, too"),
    ],
)
def test_what_a_verification_says(changes, code, words):
    result = result_with(**changes)
    outcome = Outcome(measurement=measurement_of(result), verification=result)
    assert outcome_exit(outcome, budget_bytes=result.budget_bytes) == code
    assert words in "\n".join(verdict(result))


@pytest.mark.parametrize("width", [60, 80])
def test_no_figure_is_cut_off_on_a_narrow_terminal(width):
    timing = Timing((1.261, 1.459, 1.36))
    result = result_with(measured_peak_bytes=123_456_789_012, step_timing=timing, baseline_step_timing=timing)
    console = Console(file=io.StringIO(), width=width)
    outcome = Outcome(measurement=measurement_of(result), verification=result)
    console.print(*outcome_tables(outcome, budget_bytes=100, name="model.py:make, batch 64"))
    text = console.file.getvalue()
    words = " ".join(text.split())
    assert "baseline" in words and "114.98 GiB" in words and "1.36 s ± 49.5 ms" in words
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize(("runs", "is_noisy"), [((1.2, 1.21, 1.2), False), ((0.9, 1.02, 1.4), True)])
def test_a_machine_too_busy_to_time_is_told_so(runs, is_noisy):
    result = result_with(step_timing=Timing(runs), baseline_step_timing=Timing((1.0, 1.0, 1.0)))
    console = Console(file=io.StringIO(), width=80)
    outcome = Outcome(measurement=measurement_of(result), verification=result)
    console.print(*outcome_tables(outcome, budget_bytes=100, name="x"))
    text = " ".join(console.file.getvalue().split())
    assert "Times are medians of runs in turn" in text
    assert ("(noise: ±" in text) is is_noisy and ("too noisy to tell" in text) is is_noisy
    assert outcome_data(outcome, name="x", device="cpu")["noise"] == result.noise


# a machine that is too small


def run_here(function, *, environment=None, **arguments):
    """What a fresh process would run, where another test looks at that process."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(**arguments)


def test_run_where_only_the_plan_fits_measures_it_alone(run_lowtide, budget, monkeypatch, tmp_path):
    monkeypatch.setattr(measure_step, "run_fresh", run_here)
    monkeypatch.setattr(verify_plan, "verify", lambda *_, **__: pytest.fail("must not run"))
    monkeypatch.setattr(
        measured, "why_not", lambda step, *, peak_bytes: "is large" if peak_bytes > step.budget_bytes else ""
    )
    arguments = ("run", "users_model.py:make", "-b", "512", "--budget", budget, "--timed-runs", "1")
    code, stdout, _ = run_lowtide(*arguments, "-o", str(tmp_path / "out"))
    assert code == Exit.DONE and "the step without the plan is large" in stdout
    assert "at or below the budget" in stdout and "results: not compared" in stdout
    data = json.loads((tmp_path / "out" / "verification.json").read_text())
    assert data["not_compared"] == "is large" and data["exact"] is None
    assert data["planned"]["measured_peak_bytes"] > 0 and data["baseline"]["measured_peak_bytes"] is None
    assert "not compared" in (tmp_path / "out" / "report.html").read_text()


def test_run_where_nothing_fits_leaves_profile_plan_and_report(run_lowtide, budget, monkeypatch, tmp_path):
    monkeypatch.setattr(verify_plan, "verify", lambda *_, **__: pytest.fail("must not run"))
    monkeypatch.setattr(machine, "available_bytes", lambda device: 1 << 20)
    out = tmp_path / "out"
    code, stdout, _ = run_lowtide(
        "run", "users_model.py:make", "-b", "512", "--budget", budget, "-o", str(out)
    )
    assert code == Exit.DOES_NOT_FIT and "nothing was run" in stdout
    assert names_in(out) == BEFORE_VERIFYING | REPORTED
    code, stdout, _ = run_lowtide("verify", str(out / "plan.json"))
    assert code == Exit.DOES_NOT_FIT and "nothing was run" in stdout


def test_a_failed_verification_leaves_profile_and_plan(run_lowtide, budget, monkeypatch, tmp_path):
    def fail(*_, **__):
        raise FreshProcessError("was killed")

    monkeypatch.setattr(verify_plan, "verify", fail)
    out = tmp_path / "out"
    code, _, stderr = run_lowtide(
        "run", "users_model.py:make", "-b", "512", "--budget", budget, "-o", str(out)
    )
    assert code == Exit.ERROR and "was killed" in stderr
    assert names_in(out) == BEFORE_VERIFYING


# what goes where


def test_what_a_factory_prints_does_not_mix_with_the_data(run_lowtide, folder):
    (folder / "talks.py").write_text(USERS_FILE + "\nprint('imported')\n")
    code, stdout, stderr = run_lowtide("profile", "talks.py:make", "-b", "2", "--json")
    assert code == 0 and json.loads(stdout)["peak_bytes"] > 0 and "imported" in stderr


@pytest.mark.parametrize(
    "option", [("--batch-size", "9"), ("--optimizer", "sgd"), ("--seed", "1"), ("--memory-limit", "2GiB")]
)
def test_options_of_a_target_are_refused_for_a_profile(ran, run_lowtide, option):
    out, _, _ = ran
    code, _, stderr = run_lowtide("plan", str(out / "profile.json"), "--budget", "75%", *option)
    assert code == Exit.USAGE and option[0] in stderr and stderr.count("\n") == 1


@pytest.mark.parametrize(
    "options",
    [("--budget", "abc"), ("--budget", "0"), ("--budget", "60%", "--planner", "best"),
     ("--budget", "60%", "--memory-limit", "lots")],
)  # fmt: skip
@pytest.mark.parametrize("command", [("run", "-b", "4"), ("plan", "-b", "4"), ("sweep", "-b", "4,8")])
def test_what_cannot_be_meant_is_refused_before_any_work(run_lowtide, command, options, monkeypatch):
    monkeypatch.setattr(TargetSpec, "load", lambda _: pytest.fail("must not be loaded"))
    code, stdout, stderr = run_lowtide(command[0], "users_model.py:make", *command[1:], *options)
    assert code == Exit.USAGE and stdout == "" and stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_missing_compiler_is_found_before_any_work(run_lowtide, command, monkeypatch):
    monkeypatch.setattr(TargetSpec, "load", lambda _: pytest.fail("must not be loaded"))
    monkeypatch.setattr("lowtide.torch_compat.inductor.has_compiler", lambda: False)
    arguments = ("users_model.py:make", "-b", "4", "--budget", "60%", "--executor", "inductor")
    code, _, stderr = run_lowtide(command, *arguments)
    assert code == Exit.ERROR and "needs a C++ compiler" in stderr and stderr.count("\n") == 1


def test_a_budget_that_compiled_code_does_not_meet_is_not_asked_of_the_profile(
    run_lowtide, monkeypatch, tmp_path
):
    def plan(*_, **__):
        raise BudgetTooSmall(budget_bytes=1 << 20, floor_bytes=3 << 20, node="mm")

    monkeypatch.setattr("lowtide.torch_compat.inductor.has_compiler", lambda: True)
    monkeypatch.setattr(Profile, "plan", plan)
    arguments = ("users_model.py:make", "-b", "4", "--budget", "1MiB", "--executor", "inductor")
    code, _, stderr = run_lowtide("run", *arguments, "-o", str(tmp_path))
    assert code == Exit.DOES_NOT_FIT
    command = f"lowtide run {' '.join(arguments)} -o {tmp_path}".replace("1MiB", "3072KiB")
    assert f"next: {command} --force\n" in stderr


def test_a_folder_that_cannot_be_written_to_is_found_before_any_work(run_lowtide, monkeypatch):
    monkeypatch.setattr(TargetSpec, "load", lambda _: pytest.fail("must not be loaded"))
    code, _, stderr = run_lowtide("profile", "users_model.py:make", "-b", "2", "-o", "/proc/here")
    assert code == Exit.ERROR and "cannot write into the folder /proc/here" in stderr


def test_a_cache_that_cannot_be_written_loses_nothing(run_lowtide, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", "/proc/here")
    code, stdout, stderr = run_lowtide("profile", "users_model.py:make", "-b", "2", "--json")
    assert code == 0 and json.loads(stdout)["peak_bytes"] > 0 and "costs are not remembered" in stderr
