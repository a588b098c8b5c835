"""What code between the graphs holds while it runs, forward and backward, is part of the plan."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from training import differences, measured_peak, train, twin

import lowtide
from lowtide.verification.measure_step import peak_above_start, static_bytes, train_step
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow

ROWS, WIDTH, TIMES = 96, 64, 24


@torch._dynamo.disable
def widened(x: torch.Tensor, _weight: torch.Tensor) -> torch.Tensor:
    """Keeps a small result of something large, which autograd holds as well."""
    large = x.repeat(1, TIMES)
    return (large.sin() * large.cos()).view(len(x), TIMES, WIDTH).mean(1)


@torch._dynamo.disable
def sorted_rows(x: torch.Tensor, _weight: torch.Tensor) -> torch.Tensor:
    """Large only while it runs: nothing of it is differentiated."""
    with torch.no_grad():
        large = x.repeat(1, TIMES).sort(dim=1).values
        shift = large[:, :WIDTH] + large[:, -WIDTH:]
    return x + shift


@torch._dynamo.disable
def weighed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """With a parameter that no graph reads."""
    return torch.tanh(x @ weight) @ weight.t()


@torch._dynamo.disable
def by_numpy(x: torch.Tensor, _weight: torch.Tensor) -> torch.Tensor:
    signs = torch.from_numpy(numpy.sign(x.detach().numpy()))
    return x * signs.repeat(TIMES, 1, 1).mean(0)


class Large(torch.autograd.Function):
    """Large in its backward pass alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        large = x.repeat(TIMES, 1, 1)
        return gradient * (1 - large.tanh().square()).mean(0)


@torch._dynamo.disable
def by_function(x: torch.Tensor, _weight: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Large.apply(x)
    return result


@torch._dynamo.disable
def with_a_leaf(x: torch.Tensor, _weight: torch.Tensor) -> torch.Tensor:
    """A tensor that gets a gradient and is nobody's parameter: both stay as long as the loss does."""
    return torch.zeros(TIMES, *x.shape).requires_grad_().mean(0) + x


class Net(nn.Module):
    def __init__(self, middle: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)))
        self.weight = nn.Parameter(torch.randn(WIDTH, 16 * WIDTH) / 8)
        self.middle = middle
        self.last = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x), self.weight)).square().mean()


@pytest.mark.sample(2)
@pytest.mark.parametrize("middle", [widened, sorted_rows, weighed, by_numpy, by_function, with_a_leaf])
def test_it_counts(middle: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Net(middle), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)

    def peak() -> int:
        model.zero_grad()
        return static_bytes(model, x, optimizer) + peak_above_start(lambda: train_step(model, x, optimizer))

    profile = lowtide.profile(model, x, optimizer=optimizer)
    train_step(model, x, optimizer)
    eager = peak()
    plan = profile.plan(profile.floor_bytes)
    model.zero_grad()
    plan.apply(model)
    train_step(model, x, optimizer)
    measured = peak()
    assert measured <= plan.budget_bytes
    assert abs(profile.peak_bytes - eager) <= 0.02 * eager


class Experts(nn.Module):
    """Each of which takes the tokens that were sent to it, one expert after the other."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(num_experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            if rows.numel():
                result.index_add_(0, rows, expert(x[rows]) * weights[rows, None])
        return result


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), Experts(8), nn.LayerNorm(WIDTH))
            for _ in range(2)
        )
        self.last = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x).square().mean()


@pytest.mark.long
def test_a_loop_over_experts_that_pick_their_rows_has_few_graphs() -> None:
    torch.manual_seed(0)
    model = Mixture()
    batches = [torch.randn(ROWS, WIDTH) for _ in range(3)]
    target = Target("experts", model, batches[0], torch.optim.Adam(model.parameters(), fused=True))
    expected = [train(twin(replace(target, batch=batch))) for batch in batches]
    found = lowtide.profile(model, batches[0], optimizer=target.optimizer)
    assert len([graph for graph in found.step.graphs if graph.in_model]) <= 8
    for batch, values in zip(batches, expected, strict=True):
        planned = twin(replace(target, batch=batch))
        plan = found.plan(found.floor_bytes)
        plan.apply(planned.model)
        assert differences(values, train(planned)) == []
    assert measured_peak(planned) <= plan.budget_bytes
