"""A loop whose loss reads another output than the model's own loss, as TRL's trainers do, around a function
whose backward pass makes far more than its forward pass."""

import copy

import pytest
import torch
from nets import said
from torch import nn

import lowtide
from lowtide.verification.measure_step import peak_above_start, static_bytes

pytestmark = pytest.mark.slow

WIDTH, ROWS, TILES = 32, 256, 64


class Tiled(torch.autograd.Function):
    """Its backward pass takes a buffer of many tiles."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.detach()

    @staticmethod
    @torch._dynamo.disable
    def backward(ctx, gradient):
        hidden, weight = ctx.saved_tensors
        tiles = hidden.new_zeros(TILES, *hidden.shape)
        torch.mm(gradient, weight.t(), out=tiles[0])
        return tiles[0].clone(), hidden.t() @ gradient


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)))
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    @torch._dynamo.disable
    def tiled(self, hidden):
        return Tiled.apply(hidden, self.weight)

    def forward(self, x):
        scores = self.tiled(self.layers(x)).sin()
        return {"loss": scores.square().mean(), "scores": scores.mean(1)}


def test_graphs_are_planned_again_beside_what_backward_makes_outside(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    planned, batch = Head(), torch.randn(ROWS, WIDTH)
    plain = copy.deepcopy(planned)
    found = lowtide.profile(planned, batch)
    plan = found.plan(found.floor_bytes + (found.peak_bytes - found.floor_bytes) // 4)
    assert plan.solution.graphs[0].later_bytes >= TILES * ROWS * WIDTH * 4
    plan.apply(planned)

    def step(model: nn.Module) -> None:
        model.zero_grad()
        model(batch)["scores"].sum().backward()

    for _ in range(3):
        for model in (plain, planned):
            step(model)
        assert all(
            torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), planned.parameters(), strict=True)
        )
    assert sum("graphs are planned again" in line for line in said(caplog)) == 1
    peaks = [static_bytes(m, (batch,)) + peak_above_start(lambda m=m: step(m)) for m in (plain, planned)]
    assert peaks[1] <= plan.budget_bytes < peaks[0]
