"""Gradients of earlier micro-batches: counted where a plan is told of them, to the byte."""

import copy
import logging

import pytest
import torch
from budgets import between
from torch import nn

import lowtide
from lowtide.verification.measure_step import peak_above_start, static_bytes

pytestmark = pytest.mark.slow

WIDTH = 128
MICRO_BATCHES = 2


class Network(nn.Module):
    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.first, self.last = (
            nn.Sequential(*(layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
            for _ in range(2)
        )
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(x.tanh())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    for _ in range(MICRO_BATCHES):
        output = model(batch)
        value = output.square().mean()
        value.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("rows", "breaks"), [(1024, False), (1024, True), (32, False)], ids=["forward", "two graphs", "optimizer"]
)
def test_the_peak_of_accumulation_is_foreseen(
    rows: int, breaks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    batch, plain = torch.randn(rows, WIDTH), Network(breaks=breaks)
    planned = copy.deepcopy(plain)
    models = [(model, torch.optim.Adam(model.parameters())) for model in (plain, planned)]

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    found = lowtide.profile(planned, batch, optimizer=models[1][1], loss=loss, accumulate=True)
    plan = found.plan(between(found, 0.3))
    plan.apply(planned)
    for (model, optimizer), predicted in zip(models, (found.peak_bytes, plan.peak_bytes), strict=True):
        torch.manual_seed(1)
        train(model, optimizer, batch)
        peak_bytes = static_bytes(model, batch, optimizer) + peak_above_start(
            lambda model=model, optimizer=optimizer: train(model, optimizer, batch)
        )
        assert predicted * 0.99 <= peak_bytes <= predicted
    assert all(map(torch.equal, plain.parameters(), planned.parameters()))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_other_shapes_are_planned_with_these_gradients(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, batch = Network(), torch.randn(1024, WIDTH)
    optimizer = torch.optim.Adam(model.parameters())
    found = lowtide.profile(
        model, batch, optimizer=optimizer, loss=lambda y: y.square().mean(), accumulate=True
    )
    plan = found.plan(between(found, 0.5))
    plan.apply(model)
    fewer = batch[:900]
    train(model, optimizer, fewer)
    above = peak_above_start(lambda: train(model, optimizer, fewer))
    assert static_bytes(model, fewer, optimizer) + above <= plan.budget_bytes
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_bytes_that_are_held_besides_count_throughout() -> None:
    model, batch, more = Network(), torch.randn(64, WIDTH), 12345
    alone, beside = (lowtide.profile(model, batch, reserve=nbytes) for nbytes in (0, more))
    assert beside.peak_bytes == alone.peak_bytes + more
    assert beside.floor_bytes == alone.floor_bytes + more
    lowtide.checkpoint(model, batch, budget=beside.floor_bytes, reserve=more)
    with pytest.raises(lowtide.BudgetTooSmall):
        lowtide.checkpoint(Network(), batch, budget=beside.floor_bytes - 1, reserve=more)


@pytest.mark.parametrize("breaks", [False, True])
def test_a_plan_without_recompute_takes_no_more_than_eager(breaks: bool) -> None:
    """Each gradient is added to the earlier one as soon as it is made, and freed."""
    torch.manual_seed(0)
    batch, plain = torch.randn(32, WIDTH), Network(breaks=breaks)
    planned = copy.deepcopy(plain)
    plan = lowtide.profile(planned, batch, accumulate=True).plan("300%")
    assert plan.recompute_seconds == 0
    plan.apply(planned)
    peaks = []
    for model in (plain, planned):
        optimizer = torch.optim.SGD(model.parameters())
        train(model, optimizer, batch)
        peaks.append(
            peak_above_start(lambda model=model, optimizer=optimizer: train(model, optimizer, batch))
        )
    assert peaks[1] <= peaks[0]


class Tied(nn.Module):
    """The first weight is used once more at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.between = nn.Sequential(
            *(layer for _ in range(3) for layer in (nn.Linear(2 * WIDTH, 2 * WIDTH), nn.GELU()))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.between(self.first(x)) @ self.first.weight


@pytest.mark.parametrize(("model", "autocast"), [(Network, True), (Tied, False), (Tied, True)])
def test_gradients_that_autograd_passes_on_late_are_counted(model: type[nn.Module], autocast: bool) -> None:
    """Those of weights that autocast casts, and of weights that a graph uses twice."""
    torch.manual_seed(0)
    plain, batch = model(), torch.randn(64, WIDTH)
    planned = copy.deepcopy(plain)
    pairs = [(each, torch.optim.SGD(each.parameters(), momentum=0.9)) for each in (plain, planned)]

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.float().square().mean()

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(MICRO_BATCHES):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output = model(batch)
            loss(output).backward()
        optimizer.step()
        optimizer.zero_grad()

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = lowtide.profile(planned, batch, optimizer=pairs[1][1], loss=loss, accumulate=True)
    found.plan(found.floor_bytes).apply(planned)
    for pair in pairs:
        steps(*pair)
    above = peak_above_start(lambda: steps(*pairs[1]))
    steps(*pairs[0])
    assert static_bytes(planned, batch, pairs[1][1]) + above <= found.floor_bytes
    assert all(map(torch.equal, plain.parameters(), planned.parameters()))
