"""What a notebook or a debugger shows: one short line, without a search."""

import pytest
from report_cases import make_case

from lowtide.planning import planner
from lowtide.plans import Plan
from lowtide.profiles import Profile
from lowtide.verification.verify_plan import Verification


@pytest.fixture(scope="module")
def case():
    return make_case(174)


def test_a_profile_in_one_line(case, monkeypatch):
    monkeypatch.setattr(planner, "PlanningProblem", lambda *_: pytest.fail("searched"))
    text = repr(Profile(case.step))
    assert text.startswith("Profile(peak=") and f"{len(case.step.nodes)} nodes" in text and len(text) < 100


def test_a_plan_in_one_line(case):
    text = repr(Plan(case.solution))
    assert text.startswith("Plan(budget=") and "planner=auto" in text and "activations recomputed" in text
    assert "overhead=" in text and "peak=" in text and len(text) < 160


def test_a_verification_in_one_line():
    found = Verification(
        exact=False,
        differences=("gradient of x, step 1: 7 of 9 values differ",) * 1000,
        recompute_exact=True,
        budget_bytes=100 << 20,
        predicted_peak_bytes=90 << 20,
        measured_peak_bytes=91 << 20,
        resident_peak_bytes=None,
        baseline_predicted_peak_bytes=200 << 20,
        baseline_measured_peak_bytes=201 << 20,
        baseline_resident_peak_bytes=None,
        step_timing=None,
        baseline_step_timing=None,
        fresh_process=True,
    )
    assert repr(found) == (
        "Verification(exact=False, fits=True, budget=100.0 MiB, peak=91.0 MiB, "
        "without the plan=201.0 MiB, 1000 differences)"
    )
