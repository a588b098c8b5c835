"""Models that draw random numbers, change buffers, or tie and freeze parameters."""

import torch
from torch import nn
from torch.nn import functional as F

from .sizes import WIDTH


class RandomInForward(nn.Module):
    """RReLU draws its slopes, and noise is added by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.rrelu(layer(x), training=self.training)
            x = x + torch.randn_like(x) * x.sigmoid()
        return x


class StochasticDepth(nn.Module):
    """Whole rows of a branch are dropped at random, as in DropPath."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            keep = torch.bernoulli(torch.full((x.shape[0], 1), 0.7))
            x = x + layer(x).tanh() * keep / 0.7
        return x


class DrawsInVain(nn.Module):
    """Random numbers that no op reads; they still advance the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)
        self.noisy = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise, dropped = torch.randn_like(x), self.drop(x)
        x = x + noise + dropped if self.noisy else x
        return self.last(self.drop(F.gelu(self.first(x))))


class SpectralNorm(nn.Module):
    """Buffers that every forward updates by power iteration."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.layers = nn.Sequential(
            *(nn.Sequential(norm(nn.Linear(WIDTH, WIDTH)), nn.GELU()) for _ in range(3))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class BatchNorms(nn.Module):
    """Running statistics must be counted once; two of them are shared."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm2d(6)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), norm, nn.ReLU(inplace=True)) for _ in range(2)),
            *(
                nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout2d(0.2))
                for _ in range(3)
            ),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class CountsCalls(nn.Module):
    """A buffer that forward updates, and that later values depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for layer in self.layers:
            x = torch.tanh(layer(x) + self.calls)
            self.calls.mul_(1.5)
        return x


class TiedWeights(nn.Module):
    """One matrix embeds and decodes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.middle = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH)
        )
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.middle(self.embed(tokens))).flatten(0, 1), tokens.flatten())


class FrozenAndUnused(nn.Module):
    """A frozen layer in the middle and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(7))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.silu(self.frozen(F.silu(self.first(x)))))
