"""The step of one process among many, without the others."""

import json
from functools import cache

import pytest
import torch
from sharded_cases import WORDS, Net
from torch import nn

import lowtide
from lowtide.facts import Kind
from lowtide.parallel.simulated_sharding import blocks_of, simulate_sharding
from lowtide.planning import repeated_graphs
from lowtide.torch_compat.dispatch import FakeTensorMode
from lowtide.trace.trace_model import trace

pytestmark = pytest.mark.slow


@cache
def _profile(**options) -> lowtide.Profile:
    model = Net(32, 3)
    tokens = torch.randint(0, WORDS, (4, 16))
    return lowtide.profile(model, tokens, optimizer=torch.optim.AdamW(model.parameters()), **options)


def test_more_processes_hold_less_each():
    peaks = [_profile(ranks=ranks) for ranks in (2, 8)]
    assert peaks[0].peak_bytes > peaks[1].peak_bytes
    assert peaks[0].floor_bytes > peaks[1].floor_bytes
    static = [profile.step.static_bytes for profile in peaks]
    assert static[1] < 0.5 * static[0]


def test_a_plan_on_paper_keeps_its_budget_and_uses_it_up_block_by_block(monkeypatch):
    profile = _profile(ranks=8)
    low, high = profile.floor_bytes, profile.peak_bytes
    plans = [profile.plan(low + (high - low) * i // 8) for i in range(9)]
    blocks = [[graph.schedule for graph in plan.solution.graphs if graph.in_model][1:-1] for plan in plans]
    for plan, schedules in zip(plans, blocks, strict=True):
        assert plan.peak_bytes <= plan.budget_bytes
        assert len(schedules) == 3 and len(set(schedules)) <= 2
    assert any(len(set(schedules)) == 2 for schedules in blocks)
    monkeypatch.setattr(repeated_graphs, "mixtures", lambda *_: ())
    planner = repeated_graphs.planner_for(profile.step)
    assert profile.floor_bytes <= planner.floor_bytes
    compared = [plan for plan in plans if plan.budget_bytes >= planner.floor_bytes]
    alike = [planner.solve(budget_bytes=plan.budget_bytes).recompute_seconds for plan in compared]
    found = [plan.recompute_seconds for plan in compared]
    assert sum(found) < sum(alike)
    assert all(one <= other for one, other in zip(found, alike, strict=True))


def test_a_larger_budget_is_never_slower():
    profile = _profile(ranks=8)
    low, high = profile.floor_bytes, profile.peak_bytes
    costs = [profile.plan(low + (high - low) * i // 6).recompute_seconds for i in range(7)]
    assert costs == sorted(costs, reverse=True)


class Picks(nn.Module):
    """Its experts are called with rows that values pick: outside of any graph."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where((x[:, 0] > 0).long() == number)
            found = found.index_add(0, rows, expert(x[rows]))
        return x + found


def test_weights_that_no_graph_reads_have_gradients_and_state() -> None:
    model = nn.Sequential(nn.Linear(16, 16), *(Picks() for _ in range(2)), nn.Linear(16, 16))
    found = lowtide.profile(
        model, torch.randn(32, 16), optimizer=torch.optim.AdamW(model.parameters()), ranks=2
    )
    kinds = {kind: sum(s.nbytes for s in found.step.storages if s.kind is kind and s.static) for kind in Kind}
    state = kinds[Kind.OPTIMIZER_STATE] - 4 * len(list(model.parameters()))  # a number of steps each
    assert state == 2 * kinds[Kind.PARAMETER]
    sums = sum(s.nbytes for s in found.step.storages if s.name.startswith("sum "))
    assert sums == kinds[Kind.PARAMETER]


def test_blocks_are_the_outermost_of_a_class_that_stand_side_by_side():
    model = nn.ModuleDict(
        {
            "layers": nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)),
            "head": nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
        }
    )
    assert blocks_of(model) == list(model["layers"])


def test_every_parameter_belongs_to_the_innermost_unit():
    model = Net(32, 2)
    units = simulate_sharding(model, ranks=4).sharding.units
    assert [unit.name for unit in units] == ["", "blocks.0", "blocks.1"]
    assert {part.name for part in units[1].parts} == {
        f"blocks.0.{name}" for name, _ in model.blocks[0].named_parameters()
    }
    assert sum(len(unit.parts) for unit in units) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks": 0}, "among 0 processes"),
        ({"ranks": 2, "shard": "zero3"}, "called 'zero3'"),
        ({"ranks": 2, "mode": "run"}, "mode 'ops'"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(options, words):
    with pytest.raises(lowtide.LowtideError, match=words):
        _profile(**options)


@pytest.mark.parametrize("planner", ["mu-two", "all", "every-block", "sqrt"])
def test_every_planner_plans_blocks_by_two_schedules_at_most(planner):
    profile = _profile(ranks=2)
    plan = profile.plan((profile.floor_bytes + 2 * profile.peak_bytes) // 3, planner=planner)
    assert plan.peak_bytes <= plan.budget_bytes and plan.planner == planner
    assert plan.recompute_seconds > 0
    blocks = [graph.schedule for graph in plan.solution.graphs if graph.in_model][1:-1]
    assert len(blocks) == 3 and len(set(blocks)) <= 2
    with pytest.raises(lowtide.BudgetTooSmall, match=f"This is what planner '{planner}' reaches"):
        profile.plan(profile.floor_bytes // 2, planner=planner)


def test_a_planner_that_there_is_not_is_refused():
    with pytest.raises(lowtide.LowtideError, match="there is no planner 'mutwo'"):
        _profile(ranks=2).plan("90%", planner="mutwo")


def test_the_command_line_plans_for_one_of_many_processes(run_lowtide):
    arguments = ("tiny-gpt2", "--batch-size", "2", "--sequence-length", "16", "--budget", "80%")
    code, out, _ = run_lowtide("plan", *arguments, "--ranks", "16", "--shard", "fsdp2", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["peak_bytes"] <= found["budget_bytes"]


def test_a_model_of_fake_parameters_is_captured_as_one_of_real_parameters():
    with FakeTensorMode():
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))
        batch = torch.empty(4, 8)
    simulated = simulate_sharding(model, ranks=4)
    traced = trace(model, (batch,), {}, loss=lambda out: out.sum(), simulated=simulated)
    assert len(traced.executions) >= 2
