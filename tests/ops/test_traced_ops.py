"""Ops whose gradient eager finds by looking at values, with zeros among these and without."""

import copy

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
