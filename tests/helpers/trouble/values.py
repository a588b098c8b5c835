"""Models whose values are changed in place, read late, shared, or lie in memory in unusual ways."""

import torch
from torch import nn
from torch.nn import functional as F

from .sizes import WIDTH


class InplaceResidual(nn.Module):
    """In-place adds and activations on values that backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x).mul_(0.5)
            y += x
            x = y.relu_()
        return x


class LongSkips(nn.Module):
    """Early values are needed again at the very end."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for layer in self.down:
            x = F.gelu(layer(x))
            skips.append(x)
        for layer, skip in zip(self.up, reversed(skips), strict=True):
            x = F.gelu(layer(torch.cat([x, skip], dim=1)))
        return x


class SharedModule(nn.Module):
    """One block, called many times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = self.block(x)
        return x


class IntegersAndBools(nn.Module):
    """Index tensors and masks among the saved values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        top = hidden.topk(WIDTH // 2, dim=1)
        mask = hidden > hidden.mean(1, keepdim=True)
        spread = torch.zeros_like(hidden).scatter(1, top.indices, top.values)
        return self.last(torch.where(mask, spread, hidden.sort(dim=1).values)).cummax(1).values


class Views(nn.Module):
    """Transposes, splits, expands and overlapping reads of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(1, (4, -1)).chunk(3, dim=2)
        weights = torch.softmax(q @ k.transpose(1, 2) / 4, dim=2)
        mixed = (weights @ v).transpose(0, 1).contiguous().transpose(0, 1).flatten(1)
        return self.out(mixed) + mixed.unfold(1, 1, 1)[..., 0]


class ReadTransposed(nn.Module):
    """Gradients that arrive transposed at ops whose real and fake results lie differently in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(16, 16, 3, padding=1) for _ in range(4))
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, function in zip(self.layers, (F.selu, F.hardswish, F.softplus, F.celu), strict=True):
            x = function(layer(x))
            x = x + self.norm(x.transpose(1, 2).sin().transpose(1, 2))
        return self.last(F.elu(x).transpose(1, 2))


class AttentionByHand(nn.Module):
    """Weights of attention that are masked and dropped out, and read in another order than they are made."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.values = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, values = (layer(x).unflatten(-1, (4, -1)) for layer in (self.queries, self.values))
        weights = torch.einsum("blhd,bmhd->blhm", queries, queries).softmax(-1)
        weights = F.dropout(weights.masked_fill(x[:, :, :1, None] > 1, 0.0), 0.1, self.training)
        return torch.matmul(weights.transpose(1, 2), values.transpose(1, 2))
