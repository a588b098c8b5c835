"""A small model that a test fills in, for what capture sees of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

WIDTH = 6
ROWS = 10


class Net(nn.Module):
    """Two layers; `tail` makes of the result what a test needs, `middle` stands between them."""

    def __init__(self, tail: Callable[..., Any] = lambda x: x, middle: Callable[..., Any] = lambda x: x):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tail, self.middle = tail, middle

    def forward(self, x: torch.Tensor, scale: torch.Tensor | float = 1.0) -> Any:
        return self.tail(self.last(self.middle(self.first(x)) * scale))


def rows() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "lowtide"]


def breaks(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return torch.relu(x)
