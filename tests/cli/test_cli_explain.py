"""`lowtide explain`: one activation of a plan, with the ops around it where the profile is beside it."""

import json
from pathlib import Path
from typing import Any

import pytest
from synthetic import chain

from lowtide.plans import Plan
from lowtide.profiles import Profile


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    found = Profile(chain(length=12))
    found.save(tmp_path / "profile.json")
    made = found.plan(found.floor_bytes)
    made.save(tmp_path / "plan.json")
    return made


def test_a_recomputed_activation(plan: Plan, run_lowtide: Any, tmp_path: Path) -> None:
    decision = next(d for d in plan.decisions if d.action == "RECOMPUTE")
    code, stdout, _ = run_lowtide("explain", str(tmp_path / "plan.json"), decision.name, "--json")
    rows = json.loads(stdout)
    assert code == 0 and rows["decision"].startswith("RECOMPUTE: ")
    assert decision.name in rows["brought back"] and rows["backward"] != "read by nothing"


def test_a_retained_one_is_brought_back_by_nobody(plan: Plan, run_lowtide: Any, tmp_path: Path) -> None:
    decision = next(d for d in plan.decisions if d.action == "RETAINED")
    code, stdout, _ = run_lowtide("explain", str(tmp_path / "plan.json"), decision.name)
    assert code == 0 and "RETAINED" in stdout and "brought back" not in stdout


def test_without_the_profile_the_decision_alone(plan: Plan, run_lowtide: Any, tmp_path: Path) -> None:
    (tmp_path / "profile.json").unlink()
    code, stdout, _ = run_lowtide("explain", str(tmp_path / "plan.json"), plan.decisions[0].name, "--json")
    assert code == 0 and set(json.loads(stdout)) == {"activation", "decision", "adds", "holds", "idle"}


def test_a_name_that_is_not_there(plan: Plan, run_lowtide: Any, tmp_path: Path) -> None:
    code, _, stderr = run_lowtide("explain", str(tmp_path / "plan.json"), "nothing")
    assert code == 1 and "no activation 'nothing'" in stderr and plan.decisions[0].name in stderr
