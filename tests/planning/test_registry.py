"""Planners by name: built-in ones, one of another package, and what is refused."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
import torch
from synthetic import chain
from torch import nn
from typer.testing import CliRunner

import lowtide
from lowtide.cli.app import app
from lowtide.cli.option_values import planners
from lowtide.errors import BudgetTooSmall, LowtideError
from lowtide.facts import Run
from lowtide.planning import registry
from lowtide.planning.auto import Auto
from lowtide.planning.planner import Planner
from lowtide.planning.registry import BUILT_IN, load_planner, planner_names

PACKAGE = '''
from lowtide.planning.planning_problem import PlanningProblem
from lowtide.planning.simulate import Timeline

calls = []

def largest_first(problem: PlanningProblem, budget_bytes: int) -> Timeline:
    """Recompute the largest activations until the step fits."""
    calls.append(budget_bytes)
    retained = {a.storage: a.nbytes for a in problem.activations}
    best = problem.timeline(problem.retaining(retained))
    for a in sorted(problem.activations, key=lambda a: (-a.nbytes, a.creation_rank)):
        if best.peak_bytes <= budget_bytes:
            break
        del retained[a.storage]
        found = problem.timeline(problem.retaining(retained))
        best = min(best, found, key=lambda timeline: timeline.peak_bytes)
    return best
'''


@pytest.fixture
def register(monkeypatch, tmp_path):
    """Register planners as an installed package does: `register(name="module:function", ...)`."""
    (tmp_path / "other_package.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "other_package", raising=False)

    def registered(entries):
        found = [EntryPoint(name, value, registry.GROUP) for name, value in entries]

        def entry_points(*, group, name=None):
            assert group == registry.GROUP
            return [entry for entry in found if name in (None, entry.name)]

        monkeypatch.setattr(registry, "entry_points", entry_points)

    return registered


def answering(monkeypatch, register, answer):
    """Register planner `broken`, which answers `answer(problem)`."""
    register([("broken", "other_package:broken")])
    import other_package

    monkeypatch.setattr(other_package, "broken", lambda problem, budget: answer(problem), raising=False)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_planner_is_where_the_registry_says(name):
    assert callable(load_planner(name))


def test_listing_loads_neither_planners_nor_torch_nor_numpy(register):
    register([("largest-first", "other_package:largest_first"), ("auto", "other_package:no")])
    assert planner_names() == (*BUILT_IN, "largest-first")
    assert planners("la") == ["largest-first"]
    assert "other_package" not in sys.modules
    code = (
        "import sys, lowtide.planning.registry as r; r.planner_names();"
        "sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_planner_of_another_package_plans_applies_and_is_checked(register):
    register([("largest-first", "other_package:largest_first")])
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))
    batch = torch.randn(32, 16)
    profile = lowtide.profile(model, batch, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    plan = profile.plan("95%", planner="largest-first")
    assert plan.planner == "largest-first" and plan.recompute_seconds > 0
    assert plan.peak_bytes <= plan.budget_bytes
    model(batch).sum().backward()
    eager = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    plan.apply(model)
    model(batch).sum().backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), eager, strict=True))
    with pytest.raises(BudgetTooSmall, match="This is what planner 'largest-first' reaches"):
        profile.plan("1B", planner="largest-first")


def test_auto_never_starts_from_a_planner_of_another_package(register):
    register([("largest-first", "other_package:largest_first")])
    Planner(chain(length=8)).problem.once(Auto)
    assert "other_package" not in sys.modules


def test_the_command_line_lists_and_refuses_by_what_is_registered(register):
    register([("largest-first", "other_package:largest_first")])
    refused = CliRunner().invoke(app, ["plan", "tiny-gpt2", "--budget", "80%", "--planner", "best"])
    assert refused.exit_code == 2 and "largest-first" in " ".join(refused.output.split())


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda problem: None, "gave an answer that cannot run: NoneType is neither"),
        (lambda problem: [1, 2], "gave an answer that cannot run: list is neither"),
        (lambda problem: {(0, 10**6)}, r"gave an answer that cannot run: \(0, 1000000\) is no"),
        (lambda problem: {(10**6, 0)}, "gave an answer that cannot run"),
        (lambda problem: {(0, 0)}, "gave an answer that cannot run: position 0"),
        (lambda problem: [Run(0)], "gave an answer that cannot run: .*never runs"),
        (lambda problem: 1 / 0, "failed: ZeroDivisionError: division by zero"),
    ],
)
def test_a_broken_answer_is_one_line_that_names_the_planner(register, monkeypatch, answer, said):
    answering(monkeypatch, register, answer)
    with pytest.raises(LowtideError, match=f"planner 'broken' {said}") as caught:
        Planner(chain(length=4)).solve(budget_bytes=10**9, planner="broken")
    assert "\n" not in str(caught.value)


def test_a_timeline_of_a_registered_planner_is_not_believed(register, monkeypatch):
    from dataclasses import replace

    answering(monkeypatch, register, lambda problem: replace(problem.baseline, peak_bytes=0))
    planner = Planner(chain(length=4))
    with pytest.raises(BudgetTooSmall):
        planner.solve(budget_bytes=planner.floor_bytes, planner="broken")


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([("mine", "no_such_package:planner")], r"cannot be loaded: ModuleNotFoundError"),
        ([("mine", "other_package:calls")], "is no function"),
        ([("mine", "a:b"), ("mine", "c:d")], r"several packages register a planner 'mine' \(a:b, c:d\)"),
        ([("other", "a:b")], "there is no planner 'mine': choose one of auto, .*sqrt, other"),
    ],
)
def test_a_planner_that_cannot_be_loaded_is_named(register, entries, said):
    register(entries)
    with pytest.raises(LowtideError, match=said):
        load_planner("mine")
