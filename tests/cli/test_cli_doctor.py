"""`lowtide doctor`: its block, its data and exit codes; what it finds is made up."""

import json
from dataclasses import replace

import pytest

from lowtide.cli.exit_codes import Exit
from lowtide.experiments import checkup, machine
from lowtide.experiments.checkup import CaptureCheckup, OffloadCheckup, PlanCheckup
from lowtide.experiments.machine import Note
from lowtide.facts import TransferSpeed

CAPTURED = CaptureCheckup(identity="a processor", num_ops=100, timing_noise=0.07, notes=(), free_bytes=None)
PLANNED = PlanCheckup(
    budget_bytes=150,
    predicted_peak_bytes=(200, 150),
    measured_peak_bytes=(200, 150),
    exact=True,
    differences=(),
    predicted_overhead=0.1,
    measured_overhead=0.12,
    noise=0.01,
    fresh_process=True,
)
OFFLOADED = OffloadCheckup(
    link=TransferSpeed(
        store="disk", write_bytes_per_second=2e9, read_bytes_per_second=1 << 30, latency_seconds=0.001
    ),
    num_offloaded=3,
    budget_bytes=120,
    predicted_peak_bytes=119,
    measured_peak_bytes=119,
    exact=True,
    differences=(),
)


@pytest.fixture
def finds(monkeypatch):
    """Let `lowtide doctor` find something; an exception is raised."""

    def answer(found):
        def check(*arguments):
            if isinstance(found, Exception):
                raise found
            return found

        return check

    def let(*, kind="", capture=CAPTURED, plan=PLANNED, offload=OFFLOADED, **checks):
        captured = capture if isinstance(capture, Exception) else (capture, None, None)
        for name, found in (("check_capture", captured), ("check_plan", plan), ("check_offload", offload)):
            monkeypatch.setattr(checkup, name, answer(found))
        checks = {"torch": "2.13.0", **checks}
        monkeypatch.setattr(machine, "WITH_TORCH", {})
        monkeypatch.setattr(machine, "CHECKS", {name: answer(found) for name, found in checks.items()})
        monkeypatch.setattr(machine, "accelerator_kind", lambda: kind)
        monkeypatch.setattr(machine, "why_no_accelerator", lambda: "torch sees no cuda device here")

    return let


@pytest.mark.parametrize(
    ("found", "code", "words"),
    [
        ({}, Exit.DONE, "all is well"),
        ({}, Exit.DONE, "1.00 GiB/s back"),
        ({"plan": replace(PLANNED, noise=0.5)}, Exit.DONE, "measured +12.0 % (noise: ± 50.0 %)"),
        (
            {"offload": replace(OFFLOADED, exact=False, differences=("loss",))},
            Exit.RESULTS_DIFFER,
            "results: DIFFERENT: loss",
        ),
        ({"offload": replace(OFFLOADED, num_offloaded=0)}, Exit.DOES_NOT_FIT, "NOT as promised"),
        ({"offload": replace(OFFLOADED, measured_peak_bytes=121)}, Exit.DOES_NOT_FIT, "NOT as promised"),
        (
            {"plan": replace(PLANNED, exact=False, differences=("loss, step 1",))},
            Exit.RESULTS_DIFFER,
            "DIFFERENT: loss",
        ),
        ({"plan": replace(PLANNED, measured_peak_bytes=(200, 151))}, Exit.DOES_NOT_FIT, "NOT as promised"),
        ({"plan": replace(PLANNED, measured_peak_bytes=(190, 150))}, Exit.DOES_NOT_FIT, "NOT as promised"),
        ({"capture": RuntimeError("broken")}, Exit.ERROR, "cpu: FAILED: RuntimeError: broken"),
        ({"plan": RuntimeError("no compiler")}, Exit.ERROR, "  plan: FAILED: RuntimeError: no compiler"),
        ({"plan": RuntimeError("no compiler")}, Exit.ERROR, "1.00 GiB/s back"),
        ({"offload": RuntimeError("full")}, Exit.ERROR, "results: exact\n"),
        ({"planner": OSError("no compiler")}, Exit.ERROR, "planner: FAILED: OSError: no compiler"),
        ({"planner": OSError("no compiler")}, Exit.ERROR, "captured: 100 nodes"),
        ({"load": Note("1.9 of 2 cores")}, Exit.DONE, "load: NOTE: 1.9 of 2 cores"),
        ({"torch": ImportError("libc10.so")}, Exit.ERROR, "cpu: not run: torch does not work here"),
    ],
)
def test_doctor(run_lowtide, finds, found, code, words):
    finds(**found)
    ended, stdout, _ = run_lowtide("doctor")
    assert ended == code and words in stdout and "torch: " in stdout
    assert ("accelerator: not run: torch sees no cuda device here" in stdout) == ("torch" not in found)
    ended, stdout, _ = run_lowtide("doctor", "--json")
    assert ended == code and "cpu" in json.loads(stdout)["devices"]


def test_the_accelerator_that_torch_shows_is_checked_as_the_cpu_is(run_lowtide, finds):
    finds(kind="xpu", capture=replace(CAPTURED, free_bytes=3 << 30))
    ended, stdout, _ = run_lowtide("doctor")
    assert ended == Exit.DONE and "cpu: a processor" in stdout and "xpu: a processor" in stdout
    assert "  memory: 3.00 GiB free" in stdout
    assert stdout.count("all is well") == 2 and "not run" not in stdout


def test_lines_to_paste_are_not_broken(run_lowtide, finds, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    finds(planner=OSError("a reason that goes on " * 8))
    _, stdout, _ = run_lowtide("doctor")
    line = next(line for line in stdout.splitlines() if line.startswith("planner: "))
    assert line.endswith("(this should not happen; -v shows where)")


def test_a_traceback_is_for_those_who_ask(run_lowtide, finds):
    finds(plan=RuntimeError("broken"))
    assert "Traceback" not in "".join(run_lowtide("doctor")[1:])
    assert "Traceback" in run_lowtide("doctor", "-v")[2]
