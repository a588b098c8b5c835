"""Sizes that were not captured: their steps, calls and workspaces are those of captured ones."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interpolated import find_fit, step_at
from torch import nn

import lowtide
from lowtide.experiments.fit import Vary
from lowtide.experiments.interpolate import (
    Workspaces,
    call_at,
    form_of,
    last_within,
    sizes_alike,
    with_remats_of,
)
from lowtide.ops.calls import signature
from lowtide.profiling.costing import workspace_bytes
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow

WIDTH, LENGTH = 64, 128


class Gated(nn.Module):
    """Its pointwise ops run in chunks where values are large."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x = x.sigmoid() * x.tanh()
        return x.square().mean()


def target(size):
    torch.manual_seed(0)
    return Target("gated", Gated(), torch.randn(size, LENGTH, WIDTH))


def profile(size):
    made = target(size)
    return lowtide.profile(made.model, made.batch)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """How large is large depends on how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def steps():
    return {size: profile(size).step for size in (8, 128, 256)}


def inside(step):
    return [remat.workspace_bytes for node in step.nodes for remat in node.remats]


def rules(step):
    return [tuple(remat.rule for remat in node.remats) for node in step.nodes]


def test_small_sizes_lack_remats_and_large_ones_are_interpolated_from_them(steps):
    assert rules(steps[8]) != rules(steps[128]) == rules(steps[256])
    assert form_of(steps[8]) == form_of(steps[128])
    chosen = {size: steps[size] for size in (8, 128)}
    large, small = step_at(256, chosen, degree=1), step_at(16, chosen, degree=1)
    assert rules(large) == rules(steps[256]) and rules(small) == rules(steps[8])
    assert [s.nbytes for s in large.storages] == [s.nbytes for s in steps[256].storages]


def test_a_remat_that_a_size_lacks_has_the_workspace_of_another_size(steps):
    kept = [{remat.rule for remat in node.remats} for node in steps[8].nodes]
    bare = replace(
        steps[128],
        nodes=tuple(
            replace(node, remats=tuple(r for r in node.remats if r.rule in few))
            for node, few in zip(steps[128].nodes, kept, strict=True)
        ),
    )
    resized = with_remats_of(bare, steps[256], Fraction(1, 2))
    assert rules(bare) != rules(resized) == rules(steps[128])
    assert inside(resized) == inside(steps[128])


@pytest.mark.long
def test_two_sizes_are_enough_where_only_remats_differ(steps):
    captured = []

    def source(size):
        captured.append(size)
        return target(size)

    found = find_fit(source, budget="80MiB", vary=Vary(), check=False)
    assert found.largest > found.largest_plain > 8 and len(captured) == 2


def test_a_parabola_is_drawn_through_three_sizes_where_some_form_has_them():
    forms = {64: 1, 208: 1, 512: 2, 808: 2, 1216: 2}
    assert sizes_alike(264, forms, degree=2) == [512, 808, 1216]
    assert sizes_alike(264, forms, degree=1) == [208, 64]
    assert sizes_alike(264, {64: 1, 208: 1, 512: 2}, degree=2) == [208, 64]


def convolution(size):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    )
    return lowtide.profile(model, torch.randn(size, 3, 8, 8), optimizer=torch.optim.SGD(model.parameters()))


@pytest.fixture(scope="module")
def profiles():
    return {size: convolution(size) for size in (8, 16, 40)}


def test_interpolated_calls_are_the_captured_ones(profiles):
    runs = {size: found.known.runs for size, found in profiles.items()}
    assert runs[8].keys() == runs[40].keys()
    for run, call in runs[40].items():
        assert signature(call_at(40, {size: runs[size][run] for size in (8, 16)})) == signature(call)


def test_workspaces_are_those_of_the_captured_step(profiles):
    known = {size: profiles[size].known for size in (8, 16)}
    asked = []

    def measure(calls):
        asked.append(calls)
        return workspace_bytes(calls)

    interpolated = step_at(40, {size: profiles[size].step for size in (8, 16)}, degree=1)
    workspaces = Workspaces(known, least_bytes=1, measure=measure)
    filled = workspaces.measured(interpolated, 40)
    workspace = [[node.workspace_bytes for node in step.nodes] for step in (filled, profiles[40].step)]
    assert workspace[0] == workspace[1] and any(workspace[1])
    assert any("convolution_backward" in name for name in asked[0])
    workspaces.measured(interpolated, 40)
    assert len(asked[1]) < len(asked[0]), "a workspace as interpolated is measured once"


def test_a_step_with_other_calls_is_not_interpolated(profiles):
    known = {8: profiles[8].known, 16: lowtide.profile(nn.Linear(3, 3), torch.randn(4, 3)).known}
    workspaces = Workspaces(known, least_bytes=1, measure=lambda _: pytest.fail("nothing to measure"))
    assert workspaces.measured(profiles[8].step, 40) is None


def test_noise_is_not_magnified_beyond_the_captured_sizes(profiles):
    def with_seconds(size, seconds):
        step = profiles[size].step
        return replace(step, nodes=tuple(replace(node, seconds=seconds, remats=()) for node in step.nodes))

    steps = {8: with_seconds(8, 1.0), 16: with_seconds(16, 4.0)}
    for size, seconds in ((4, 0.5), (12, 2.5), (32, 8.0)):
        assert {node.seconds for node in step_at(size, steps, degree=1).nodes} == {seconds}
    steps = {8: with_seconds(8, 1.0), 16: with_seconds(16, 1.5)}
    for size, seconds in ((4, 0.75), (12, 1.25), (32, 2.5)):
        assert {node.seconds for node in step_at(size, steps, degree=1).nodes} == {seconds}


def test_a_plan_does_not_keep_the_calls_of_the_step(profiles):
    found = profiles[8]
    plan = found.plan("100%")
    assert found.known.runs and not plan.known.runs
    run, call = next((run, call) for run, call in found.known.runs.items() if call.tensors)
    assert plan.known.measured_cost(call) == found.known.measured_cost(call) is not None, run


@given(
    st.integers(1, 8),
    st.integers(1, 10_000),
    st.integers(0, 1000),
    st.sampled_from([1.0, 1.3, 2.0, 0.7]),
    st.integers(0, 10**7),
    st.lists(st.integers(1, 200), max_size=3),
)
def test_it_is_the_last_that_fits(unit, slope, start, power, budget, first):
    most = 5000 // unit * unit

    def needed(size):
        return start + slope * size**power

    first = sorted({unit * size for size in first if unit * size <= most})
    found = last_within(budget, needed, low=0, high=most + unit, unit=unit, most=most, first=first)
    assert found % unit == 0 and 0 <= found <= most
    assert found == 0 or needed(found) <= budget
    assert found == most or needed(found + unit) > budget


@pytest.mark.parametrize("budget", [700, 70_000, 7_000_000])
def test_a_line_takes_few_questions(budget):
    asked = []

    def needed(size):
        asked.append(size)
        return 100 + 13 * size

    found = last_within(budget, needed, low=0, high=(1 << 20) + 1, unit=1, most=1 << 20, first=[8, 16])
    assert found == (budget - 100) // 13
    assert len(asked) <= 10


def test_an_unknown_size_gives_no_answer():
    assert last_within(10, lambda size: None, low=0, high=11, unit=1, most=10) is None
