"""Frames of Python between graphs keep values live that eager drops: plans count them."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from lowtide.facts import FRAMES
from lowtide.facts.serial import solution_to_dict
from lowtide.verification.comparison import planned
from lowtide.verification.measure_step import measure_here
from lowtide.zoo.targets import Target

WIDTH, ROWS = 64, 512


class Branch(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.linear, self.drop, self.breaks = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), breaks

    def forward(self, value: Tensor) -> Tensor:
        made = functional.gelu(self.linear(value))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.drop(made)


class Residuals(nn.Module):
    """Adds what a branch returns after a graph break, which is inside of the branch or behind it."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch(inside) for _ in range(4))
        self.inside = inside

    def forward(self, value: Tensor) -> Tensor:
        for branch in self.branches:
            made = branch(value)
            if not self.inside:
                torch._dynamo.graph_break()
            value = value + made
        return value.square().mean()


@dataclass
class Details:
    """What a layer returns beside its value, as decoders return their attention's."""

    scores: Tensor


class WithDetails(nn.Module):
    """Collects objects with tensors in its frame, and needs them until it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch(breaks=True) for _ in range(4))

    def forward(self, value: Tensor) -> Tensor:
        details = []
        for branch in self.branches:
            value = value + branch(value)
            details.append(Details(value.detach().repeat(1, 4)))
        torch._dynamo.graph_break()
        return value.repeat(1, 8).square().mean() / len(details)


@pytest.mark.sample(1)
@pytest.mark.parametrize("inside", [False, True])
def test_a_plan_counts_what_frames_keep_live(inside: bool) -> None:
    model, batch = Residuals(inside=inside), torch.randn(ROWS, WIDTH)
    target = Target("residuals", model, batch, torch.optim.SGD(model.parameters(), lr=0.1))
    profile = lowtide.profile(model, batch, optimizer=target.optimizer)
    assert any(node.op == FRAMES and node.reads for node in profile.step.nodes)
    plan = profile.plan("90%" if inside else "75%")
    prepare = partial(planned, solution=solution_to_dict(plan.solution))
    measured = measure_here(target, prepare=prepare)
    assert measured.peak_bytes <= plan.peak_bytes
    assert 0 <= profile.peak_bytes - measure_here(target).peak_bytes <= 16384


def test_a_plan_counts_what_objects_in_frames_keep_live() -> None:
    model, batch = WithDetails(), torch.randn(ROWS, WIDTH)
    profile = lowtide.profile(model, batch)
    plan = profile.plan("100%")
    prepare = partial(planned, solution=solution_to_dict(plan.solution))
    measured = measure_here(Target("details", model, batch, None), prepare=prepare)
    assert abs(measured.peak_bytes / plan.peak_bytes - 1) < 0.01
