"""A `torch.autograd.Function` that torch traces in pieces: its own backward is outside of the graphs."""

from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.verification.measure_step import peak_above_start, static_bytes, train_step

pytestmark = pytest.mark.slow


class LogSum(torch.autograd.Function):
    """Of scores that are made again in the backward pass; its forward breaks the graph."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scores = torch.empty(len(hidden), len(weight))
        torch.mm(hidden, weight.t(), out=scores)
        torch._dynamo.graph_break()
        result = scores.logsumexp(1)
        ctx.save_for_backward(hidden, weight, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight, result = ctx.saved_tensors
        shares = (hidden @ weight.t() - result[:, None]).exp() * gradient[:, None]
        return shares @ weight, shares.t() @ hidden


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.weight = nn.Parameter(torch.randn(512, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return LogSum.apply(self.body(x), self.weight).mean() * 2


def test_it_is_said_and_what_the_loss_reaches_through_it_is_planned(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(256, 32)
    profile = lowtide.profile(model, x)
    assert any("outside of its graphs" in note for note in profile.step.notes)
    assert any("counted as it was seen" in record.getMessage() for record in caplog.records)
    measured = static_bytes(model, x, None) + peak_above_start(lambda: train_step(model, x, None))
    assert abs(profile.peak_bytes - measured) <= 0.02 * measured
    plan = profile.plan("100%")
    model(x).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    caplog.clear()
    plan.apply(model)
    model(x).backward()
    assert all(map(torch.equal, expected, (parameter.grad for parameter in model.parameters())))
    model.zero_grad()
    model(x)  # whatever was learned from the step is said here
    assert not [record for record in caplog.records if "did not count on" in record.getMessage()]
