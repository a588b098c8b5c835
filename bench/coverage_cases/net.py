"""The small model that most loops train."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .case import Training, Values, adam, plain_loop

WIDTH, ROWS, CLASSES, LENGTH, NOISE = 24, 128, 5, 6, 4
"""So many rows that activations set the peak, and not the optimizer: else a plan would recompute nothing."""
SENTENCES = 32
ROW_BYTES = WIDTH * 4


class Net(nn.Module):
    """Two blocks and a head; `middle` is called between the blocks."""

    def __init__(self, middle: Callable[[Any, torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.1)
        self.last = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, CLASSES))
        self.middle = middle
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.norm(self.first(x)))
        if self.middle is not None:
            hidden = self.middle(self, hidden)
        result: torch.Tensor = self.last(hidden)
        return result


NET_BYTES = sum(tensor.nbytes for tensor in (*Net().parameters(), *Net().buffers())) + 8
GENERATOR_BYTES = 4 * (ROWS * NOISE + WIDTH * NOISE + WIDTH)


def classes_loss(output: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, torch.arange(len(output)) % CLASSES)


def training_of(
    loop: Callable[[Training], Values] | None = None,
    *,
    model: Callable[[], nn.Module] = Net,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer | None] = adam,
    loss: Callable[[Any], torch.Tensor] | None = classes_loss,
    batch: Callable[[], Any] = lambda: torch.randn(ROWS, WIDTH),
    loop_bytes: int = 0,
    accumulate: bool = False,
) -> Training:
    torch.manual_seed(0)
    made = model()
    return Training(made, batch(), optimizer(made), loss, loop or plain_loop, loop_bytes, accumulate)
