"""Ops that eager computes by looking at values: zeros among factors, ignored targets."""

import copy
import math

import pytest
import torch
from torch import nn

import lowtide

pytestmark = pytest.mark.slow

WIDTH = 32


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.fill = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        filled = h.sin().masked_fill(h > 0, self.fill)
        return (
            torch.stack([h.sin(), h.cos(), filled]).prod(dim=0).sum()
            + h.relu().prod(-1, keepdim=True, dtype=torch.float64).sum()
            + (1 + h[0] / WIDTH).prod()
            + (h * (h.long() + 3).prod(1, keepdim=True)).mean()
        )


def test_products_and_filled_masks() -> None:
    torch.manual_seed(0)
    planned, batch = Products(), torch.randn(16, WIDTH)
    plain = copy.deepcopy(planned)
    found = lowtide.profile(planned, batch)
    found.plan(found.floor_bytes).apply(planned)
    planned(batch).backward()
    plain(batch).backward()
    assert len(found.step.graphs) == 1
    for ours, eager in zip(planned.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, eager.grad)


class Loss(nn.Module):
    """A cross entropy with class weights, of scores at each of the `places`."""

    weight: torch.Tensor

    def __init__(self, *places: int, **options: object) -> None:
        super().__init__()
        self.layer, self.places, self.options = nn.Linear(WIDTH, 40 * math.prod(places)), places, options
        self.register_buffer("weight", torch.rand(40))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        scores = self.layer(x).view(-1, 40, *self.places)
        return nn.functional.cross_entropy(scores, target, weight=self.weight, **self.options).sum()


def check_against_eager(planned: nn.Module, batch: object) -> None:
    plain = copy.deepcopy(planned)
    found = lowtide.profile(planned, batch)
    found.plan(found.floor_bytes).apply(planned)
    args = batch if isinstance(batch, tuple) else (batch,)
    expected, seen = plain(*args), planned(*args)
    expected.backward()
    seen.backward()
    assert len(found.step.graphs) == 1
    assert torch.equal(seen, expected)
    for ours, eager in zip(planned.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, eager.grad)


@pytest.mark.sample(3)
@pytest.mark.parametrize("places", ((), (3,), (2, 2)), ids=str)
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_a_smoothed_cross_entropy_sums_the_weights_of_targets_that_are_not_ignored(places, reduction) -> None:
    torch.manual_seed(0)
    model = Loss(*places, label_smoothing=0.1, reduction=reduction)
    batch = torch.randn(1024, WIDTH)
    target = torch.randint(40, model.layer(batch).view(-1, 40, *places).select(1, 0).shape)
    check_against_eager(model, (batch, target.masked_fill(torch.rand(target.shape) < 0.3, -100)))


class Cumulative(nn.Module):
    def __init__(self, shift: float) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(WIDTH, WIDTH), shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.shift + self.layer(x).relu()).cumprod(1).mean()


@pytest.mark.parametrize("shift", (0.0, 1.0))
def test_cumulative_products_with_zeros_and_without(shift: float) -> None:
    torch.manual_seed(0)
    check_against_eager(Cumulative(shift), torch.randn(64, WIDTH))
