"""What reference cycles of uncaptured code keep live is the same in every capture."""

import gc
from typing import Any

import pytest
import torch
from torch import nn

import lowtide

WIDTH = 64


class Lazy:
    """An object that refers to itself, as lazily evaluated operators do."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value, self.self = value, self


class MakesCycles(nn.Module):
    """Reads a number between two graphs; `churns`: makes so many objects that the collector would run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.churns = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.outside(self.first(x))
        return self.last(hidden).square().mean()

    @torch._dynamo.disable
    def outside(self, x: torch.Tensor) -> Any:
        scale = float(x.detach().abs().amax())
        for _ in range(4):
            x = Lazy(x * scale).value + 1
            if self.churns:
                _ = [[] for _ in range(120_000)]
        return x


@pytest.mark.slow
def test_a_named_floor_is_met_by_another_capture() -> None:
    torch.manual_seed(0)
    model, x = MakesCycles(), torch.randn(256, WIDTH)
    was_enabled = gc.isenabled()
    found = lowtide.profile(model, x)
    model.churns = True
    again = lowtide.profile(model, x)
    assert again.floor_bytes == found.floor_bytes
    assert gc.isenabled() is was_enabled
