"""Models that torch captures in several graphs, otherwise than eager runs them, or by code of their own."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .sizes import WIDTH


class GraphBreak(nn.Module):
    """Python that cannot be captured in the middle of the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.last = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.GELU(), nn.Linear(WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(x)


class FrozenBeforeABreak(nn.Module):
    """A part without gradients that is a graph of its own, with a dropout that drops while training."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.15)).requires_grad_(False)
        self.trained = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(x)
        torch._dynamo.graph_break()
        return self.trained(x)


class EqualBlocks(nn.Module):
    """Graphs that differ in nothing but the parameters that they read."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU())
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        x = self.blocks[1](x)
        torch._dynamo.graph_break()
        return self.blocks[2](x)


class ReadsValues(nn.Module):
    """Control flow that depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).gelu() if hasattr(x, "gelu") else F.gelu(self.first(x))
        if x.mean().item() > -100:
            x = x * 2
        return F.gelu(self.last(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gate = x.sigmoid()
        return grad * (gate + x * gate * (1 - gate))


class CustomFunction(nn.Module):
    """An autograd function with a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = _Swish.apply(layer(x))
        return x


class Constants(nn.Module):
    """Tensors that forward makes from numbers, read again by backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            slopes = torch.tensor([float(number + i % 3) for i in range(WIDTH)])
            x = torch.tanh(layer(x) * slopes) * torch.tensor(0.5)
        return x


class Upsampling(nn.Module):
    """Ops that torch traces by decompositions which round differently, in the channels-last layout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(6, 6, 3, stride=2, padding=1) for _ in range(4))
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        for layer, mode in zip(self.layers, ("nearest", "bilinear", "bicubic", "nearest-exact"), strict=True):
            x = F.interpolate(F.softshrink(layer(x), 0.01), scale_factor=2, mode=mode) + F.hardshrink(x, 0.01)
        return x
