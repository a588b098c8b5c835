"""Small models written for trouble: whatever is known to break recompute, graph capture, or both."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 48
BATCH = 64


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


class DrawsInVain(nn.Module):
    """Random numbers that nobody reads, which move the generator on all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)
        self.noisy = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise, dropped = torch.randn_like(x), self.drop(x)
        x = x + noise + dropped if self.noisy else x
        return self.last(self.drop(F.gelu(self.first(x))))


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


class Widening(nn.Module):
    """The largest value is the one that the loss outside reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 8 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(x)
        return result


@dataclass
class Results:
    scores: torch.Tensor
    hidden: torch.Tensor


class DataclassOutput(TupleOutput):
    def forward(self, x: torch.Tensor) -> Results:  # type: ignore[override]
        hidden = self.body(x)
        return Results(scores=self.left(hidden), hidden=hidden * hidden)


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


LOSSES = (F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.soft_margin_loss)


@dataclass(frozen=True)
class Trouble:
    """A model to build, its batch, and what it needs besides."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[Any], torch.Tensor] | None = None


def _floats(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(*shape, dtype=dtype)


def _outer_loss(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(output[0], torch.zeros(BATCH, dtype=torch.long)) + output[1].square().mean()


def _loss_of_results(output: Results) -> torch.Tensor:
    return output.scores.abs().mean() + output.hidden.mean()


ROWS = _floats(BATCH, WIDTH)
TROUBLE = {
    "in-place-residual": Trouble(InplaceResidual, ROWS),
    "random-in-forward": Trouble(RandomInForward, ROWS),
    "stochastic-depth": Trouble(StochasticDepth, ROWS),
    "spectral-norm": Trouble(SpectralNorm, ROWS),
    "tied-weights": Trouble(TiedWeights, lambda: torch.randint(0, 50, (8, 16))),
    "frozen-and-unused": Trouble(FrozenAndUnused, ROWS),
    "graph-break": Trouble(GraphBreak, ROWS),
    "frozen-before-a-break": Trouble(FrozenBeforeABreak, ROWS),
    "equal-blocks": Trouble(EqualBlocks, _floats(4 * BATCH, WIDTH)),
    "draws-in-vain": Trouble(DrawsInVain, ROWS),
    "reads-values": Trouble(ReadsValues, ROWS),
    "lstm": Trouble(Recurrent, _floats(8, 6, WIDTH)),
    "custom-function": Trouble(CustomFunction, ROWS),
    "long-skips": Trouble(LongSkips, ROWS),
    "shared-module": Trouble(SharedModule, ROWS),
    "tuple-output": Trouble(TupleOutput, ROWS, _outer_loss),
    "tuple-output-summed": Trouble(TupleOutput, ROWS),
    "dict-output": Trouble(DictOutput, ROWS),
    "loss-of-powers": Trouble(Widening, ROWS, lambda output: output.square().mean()),
    "dataclass-output": Trouble(DataclassOutput, ROWS, _loss_of_results),
    "batch-norms": Trouble(BatchNorms, _floats(4, 6, 12, 12)),
    "counts-calls": Trouble(CountsCalls, ROWS),
    "integers-and-bools": Trouble(IntegersAndBools, ROWS),
    "views": Trouble(Views, ROWS),
    "constants": Trouble(Constants, ROWS),
    "losses-inside": Trouble(LossesInside, _floats(8 * BATCH, WIDTH), sum),
    "read-transposed": Trouble(ReadTransposed, _floats(8, 16, 100), lambda output: output.abs().mean()),
    "upsampling": Trouble(Upsampling, _floats(4, 6, 16, 16)),
    "double": Trouble(lambda: SharedModule().double(), _floats(BATCH, WIDTH, dtype=torch.float64)),
    "bfloat16": Trouble(lambda: SharedModule().bfloat16(), _floats(BATCH, WIDTH, dtype=torch.bfloat16)),
}
