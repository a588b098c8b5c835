"""Models that return more than one tensor, or losses, or something large that the loss outside reads."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from .sizes import WIDTH


class TupleOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.left = nn.Linear(WIDTH, 3)
        self.right = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x)
        return self.left(hidden), self.right(hidden)


class DictOutput(TupleOutput):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        left, right = super().forward(x)
        return {"loss": left.square().mean() + right.abs().mean(), "left": left, "argmax": right.argmax(1)}


@dataclass
class Results:
    scores: torch.Tensor
    hidden: torch.Tensor


class DataclassOutput(TupleOutput):
    def forward(self, x: torch.Tensor) -> Results:  # type: ignore[override]
        hidden = self.body(x)
        return Results(scores=self.left(hidden), hidden=hidden * hidden)


class Widening(nn.Module):
    """The largest value is the one that the loss outside reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 8 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(x)
        return result


LOSSES = (F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.soft_margin_loss)


class LossesInside(nn.Module):
    """Losses whose mean, one number, keeps a block of the size of what it was taken over."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        losses = []
        for layer, loss in zip(self.layers, LOSSES, strict=True):
            y = torch.sigmoid(layer(x))
            losses.append(loss(y, x.detach().sigmoid()))
            x = y * x
        return tuple(losses)
