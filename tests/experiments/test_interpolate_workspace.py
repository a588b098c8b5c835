"""Calls on paper are those of a captured step, and ops that cannot be run alone are told from slices."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import lowtide
from lowtide.experiments.interpolate_step import step_at
from lowtide.experiments.interpolate_workspace import Insides, call_at
from lowtide.ops.calls import signature
from lowtide.profiling.costing import workspace_bytes

pytestmark = pytest.mark.slow


def profile(size):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    )
    return lowtide.profile(model, torch.randn(size, 3, 8, 8), optimizer=torch.optim.SGD(model.parameters()))


@pytest.fixture(scope="module")
def profiles():
    return {size: profile(size) for size in (8, 16, 40)}


def test_calls_on_paper_are_the_captured_ones(profiles):
    runs = {size: found.known.runs for size, found in profiles.items()}
    assert runs[8].keys() == runs[40].keys()
    for run, call in runs[40].items():
        assert signature(call_at(40, {size: runs[size][run] for size in (8, 16)})) == signature(call)


def test_what_ops_hold_inside_is_that_of_the_captured_step(profiles):
    known = {size: profiles[size].known for size in (8, 16)}
    asked = []

    def measure(calls):
        asked.append(calls)
        return workspace_bytes(calls)

    paper = step_at(40, {size: profiles[size].step for size in (8, 16)}, degree=1)
    insides = Insides(known, least_bytes=1, measure=measure)
    filled = insides.fill(paper, 40)
    held = [[node.workspace_bytes for node in step.nodes] for step in (filled, profiles[40].step)]
    assert held[0] == held[1] and any(held[1])
    assert any("convolution_backward" in name for name in asked[0])
    insides.fill(paper, 40)
    assert len(asked[1]) < len(asked[0]), "what is on the line is asked once"


def test_a_step_with_other_calls_is_not_told(profiles):
    known = {8: profiles[8].known, 16: lowtide.profile(nn.Linear(3, 3), torch.randn(4, 3)).known}
    insides = Insides(known, least_bytes=1, measure=lambda _: pytest.fail("nothing to measure"))
    assert insides.fill(profiles[8].step, 40) is None


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
