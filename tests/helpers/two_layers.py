"""A model of two layers that does whatever a test wants in between, and its batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.ao import quantization

ROWS, WIDTH = 64, 32


class Two(nn.Module):
    """Two layers, and `middle` between them; `body` is all that forward does with them."""

    def __init__(self, body: Callable[..., Any] | None = None, *, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Tanh() if middle is None else middle
        self.body = body
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.generator = torch.Generator().manual_seed(3)
        self.calls = 0

    def forward(self, x: torch.Tensor, **options: Any) -> Any:
        if self.body is not None:
            return self.body(self, x, **options)
        return self.last(self.middle(self.first(x))).square().mean()


def rows() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH)


def quantized() -> nn.Module:
    """Aware of quantization; its observers have seen one batch."""
    model = nn.Sequential(
        quantization.QuantStub(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), quantization.DeQuantStub()
    )
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(model.train())
