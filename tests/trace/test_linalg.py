"""Solvers and decompositions check their result, and raise: also in a model that counts its calls."""

import copy

import pytest
import torch
from torch import nn
from training import measured_peak

import lowtide
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow

WIDTH = 16


class Solver(nn.Module):
    """Solves and decomposes with a trained matrix between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.1))
        self.matrix = nn.Parameter(torch.eye(WIDTH) + 0.01 * torch.randn(WIDTH, WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = torch.linalg.solve(self.matrix, self.first(x).t()).t()
        factor = torch.linalg.cholesky(self.matrix @ self.matrix.t())
        return (hidden @ factor).square().mean()


def train(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *model.state_dict().values()]


def test_solvers_are_exact_and_still_check(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    eager = Solver()
    planned = copy.deepcopy(eager)
    batch = torch.randn(256, WIDTH)
    optimizer = torch.optim.SGD(planned.parameters(), lr=0.1)
    found = lowtide.profile(planned, batch, optimizer=optimizer, cache=False)
    assert [node.name for node in found.nodes if "check_errors" in node.op]
    assert "costed by its bytes" not in caplog.text, "every op can be timed"
    plan = found.plan((found.floor_bytes + found.peak_bytes) // 2)
    plan.apply(planned)
    assert all(
        torch.equal(one, other) for one, other in zip(train(planned, batch), train(eager, batch), strict=True)
    )
    measured = measured_peak(Target("solver", planned, batch, optimizer))
    assert measured <= plan.budget_bytes and abs(measured - plan.peak_bytes) <= plan.peak_bytes // 100 + 2048
    with torch.no_grad():
        eager.matrix.zero_(), planned.matrix.zero_()
    for model in (eager, planned):
        with pytest.raises(torch.linalg.LinAlgError, match="singular"):
            model(batch)
