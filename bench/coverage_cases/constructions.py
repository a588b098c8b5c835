"""Plain torch.nn models, one for each construction that training code is made of."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .case import Case, Training, adam

WIDTH, ROWS, LENGTH, SIDE = 24, 8, 10, 12
Forward = Callable[..., torch.Tensor]


class Applied(nn.Module):
    """Modules by name, and a function that says how they are applied."""

    def __init__(self, apply: Forward, **parts: Any) -> None:
        super().__init__()
        self.function = apply
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            elif isinstance(part, nn.Parameter):
                self.register_parameter(name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(self, *inputs).float().square().mean()


def _rows() -> tuple[torch.Tensor, ...]:
    return (torch.randn(ROWS, WIDTH),)


def _sequence() -> tuple[torch.Tensor, ...]:
    return (torch.randn(ROWS, LENGTH, WIDTH),)


def _images() -> tuple[torch.Tensor, ...]:
    return (torch.randn(ROWS, 3, SIDE, SIDE),)


def _tokens() -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, 50, (ROWS, LENGTH)),)


def _linear(width: int = WIDTH) -> nn.Module:
    return nn.Linear(width, width)


def _mlp() -> nn.Module:
    return nn.Sequential(_linear(), nn.GELU(), _linear())


def _convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))


def _tied(model: Any, x: torch.Tensor) -> torch.Tensor:
    return F.linear(model.embed(x), model.embed.weight)


def _rotary(model: Any, x: torch.Tensor) -> torch.Tensor:
    angles = torch.arange(LENGTH)[:, None] / torch.arange(1, WIDTH // 2 + 1)
    one, other = model.layer(x).chunk(2, dim=-1)
    return torch.cat(
        [one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()], -1
    )


def _attention(model: Any, x: torch.Tensor) -> torch.Tensor:
    query, key, value = model.layer(x).view(ROWS, LENGTH, 3, 4, -1).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _masked_attention(model: Any, x: torch.Tensor) -> torch.Tensor:
    query, key, value = model.layer(x).view(ROWS, LENGTH, 3, 4, -1).permute(2, 0, 3, 1, 4)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=0.1)


def _experts(model: Any, x: torch.Tensor) -> torch.Tensor:
    weights, chosen = model.gate(x).softmax(-1).topk(2)
    result = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        share = (weights * (chosen == number)).sum(-1, keepdim=True)
        result = result + share * expert(x)
    return result


def _unet(model: Any, x: torch.Tensor) -> torch.Tensor:
    first = model.down(x)
    second = model.middle(F.max_pool2d(first, 2))
    return model.up(torch.cat([first, F.interpolate(second, scale_factor=2, mode="bilinear")], dim=1))


def _checkpointed(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.last(checkpoint(model.first, x, use_reentrant=False))


def _in_place(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.layer(x).mul_(2).add_(x).relu_()


def _einsum(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bld,bmd->blm", model.layer(x), x).softmax(-1)


def _scatter(model: Any, x: torch.Tensor) -> torch.Tensor:
    top = model.layer(x).topk(4, dim=-1)
    return torch.zeros_like(x).scatter(-1, top.indices, top.values)


def _running(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.mean.mul_(0.9).add_(x.mean(0).detach(), alpha=0.1)
    return model.layer(x - model.mean)


def _weights_of_weights(model: Any, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, model.layer.weight / model.layer.weight.norm(dim=1, keepdim=True) * model.scale)


def _quantized(model: Any, x: torch.Tensor) -> torch.Tensor:
    value = model.layer(x)
    distance = torch.cdist(value, model.codes)
    nearest = model.codes[distance.argmin(-1)]
    return value + (nearest - value).detach() + nearest


def _mixed_types(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.last(model.first(x).to(torch.bfloat16).tanh().float())


def _complex(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.fft.irfft(torch.fft.rfft(model.layer(x)) * 0.5, n=WIDTH)


def _scan(model: Any, x: torch.Tensor) -> torch.Tensor:
    state, found = torch.zeros(ROWS, WIDTH), []
    for index in range(LENGTH):
        state = torch.tanh(model.layer(x[:, index]) + 0.9 * state)
        found.append(state)
    return torch.stack(found, dim=1)


def _early_exit(model: Any, x: torch.Tensor) -> torch.Tensor:
    first = model.first(x)
    return torch.where(first.mean(-1, keepdim=True) > 0, first, model.last(first))


def _transformer(layer: type[nn.Module], **options: Any) -> nn.Module:
    return layer(WIDTH, 4, dim_feedforward=48, batch_first=True, **options)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "mlp": (lambda: Applied(lambda m, x: m.net(x), net=_mlp()), _rows),
    "deep-residual": (
        lambda: Applied(
            lambda m, x: x + m.three(x + m.two(x + m.one(x))), one=_mlp(), two=_mlp(), three=_mlp()
        ),
        _rows,
    ),
    "dropout": (
        lambda: Applied(lambda m, x: m.net(x), net=nn.Sequential(_mlp(), nn.Dropout(0.3), _mlp())),
        _rows,
    ),
    "alpha-dropout": (
        lambda: Applied(lambda m, x: m.net(x), net=nn.Sequential(_linear(), nn.SELU(), nn.AlphaDropout(0.2))),
        _rows,
    ),
    "layer-norm": (
        lambda: Applied(lambda m, x: m.net(x), net=nn.Sequential(_mlp(), nn.LayerNorm(WIDTH))),
        _rows,
    ),
    "rms-norm": (lambda: Applied(lambda m, x: m.net(x), net=nn.Sequential(_mlp(), nn.RMSNorm(WIDTH))), _rows),
    "batch-norm": (
        lambda: Applied(
            lambda m, x: m.net(x), net=nn.Sequential(_linear(), nn.BatchNorm1d(WIDTH), _linear())
        ),
        _rows,
    ),
    "group-norm": (
        lambda: Applied(
            lambda m, x: m.net(x), net=nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU())
        ),
        _images,
    ),
    "instance-norm": (
        lambda: Applied(
            lambda m, x: m.net(x), net=nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.GELU())
        ),
        _images,
    ),
    "convolutions": (lambda: Applied(lambda m, x: m.net(x), net=_convolutions()), _images),
    "depthwise": (
        lambda: Applied(
            lambda m, x: m.net(x), net=nn.Sequential(_convolutions(), nn.Conv2d(8, 8, 3, groups=8))
        ),
        _images,
    ),
    "transposed-convolution": (
        lambda: Applied(
            lambda m, x: m.net(x), net=nn.Sequential(_convolutions(), nn.ConvTranspose2d(8, 4, 2, 2))
        ),
        _images,
    ),
    "convolution-1d": (
        lambda: Applied(
            lambda m, x: m.net(x.transpose(1, 2)), net=nn.Conv1d(WIDTH, 8, 3, padding=2, dilation=2)
        ),
        _sequence,
    ),
    "pooling": (
        lambda: Applied(
            lambda m, x: m.net(x),
            net=nn.Sequential(_convolutions(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(3)),
        ),
        _images,
    ),
    "u-net": (
        lambda: Applied(
            _unet,
            down=_convolutions(),
            middle=nn.Conv2d(8, 8, 3, padding=1),
            up=nn.Conv2d(16, 3, 3, padding=1),
        ),
        _images,
    ),
    "pixel-shuffle": (
        lambda: Applied(
            lambda m, x: m.net(x), net=nn.Sequential(nn.Conv2d(3, 12, 3), nn.PixelShuffle(2), nn.PReLU())
        ),
        _images,
    ),
    "lstm": (
        lambda: Applied(lambda m, x: m.net(x)[0], net=nn.LSTM(WIDTH, 16, 2, batch_first=True)),
        _sequence,
    ),
    "gru": (
        lambda: Applied(
            lambda m, x: m.net(x)[0], net=nn.GRU(WIDTH, 16, bidirectional=True, batch_first=True)
        ),
        _sequence,
    ),
    "rnn-with-dropout": (
        lambda: Applied(lambda m, x: m.net(x)[0], net=nn.RNN(WIDTH, 16, 2, dropout=0.2, batch_first=True)),
        _sequence,
    ),
    "lstm-cell-loop": (
        lambda: Applied(lambda m, x: m.net(x[:, 1], m.net(x[:, 0]))[0], net=nn.LSTMCell(WIDTH, 16)),
        _sequence,
    ),
    "scan": (lambda: Applied(_scan, layer=_linear()), _sequence),
    "embedding": (
        lambda: Applied(lambda m, x: m.net(x), net=nn.Embedding(50, WIDTH, padding_idx=0)),
        _tokens,
    ),
    "embedding-bag": (lambda: Applied(lambda m, x: m.net(x), net=nn.EmbeddingBag(50, WIDTH)), _tokens),
    "tied-weights": (lambda: Applied(_tied, embed=nn.Embedding(50, WIDTH)), _tokens),
    "attention": (lambda: Applied(_attention, layer=nn.Linear(WIDTH, 3 * WIDTH)), _sequence),
    "masked-attention": (lambda: Applied(_masked_attention, layer=nn.Linear(WIDTH, 3 * WIDTH)), _sequence),
    "multi-head-attention": (
        lambda: Applied(
            lambda m, x: m.net(x, x, x)[0], net=nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        ),
        _sequence,
    ),
    "encoder-layer": (
        lambda: Applied(lambda m, x: m.net(x), net=_transformer(nn.TransformerEncoderLayer)),
        _sequence,
    ),
    "encoder-norm-first": (
        lambda: Applied(lambda m, x: m.net(x), net=_transformer(nn.TransformerEncoderLayer, norm_first=True)),
        _sequence,
    ),
    "decoder-layer": (
        lambda: Applied(lambda m, x: m.net(x, x), net=_transformer(nn.TransformerDecoderLayer)),
        _sequence,
    ),
    "rotary": (lambda: Applied(_rotary, layer=_linear()), _sequence),
    "experts": (
        lambda: Applied(_experts, gate=nn.Linear(WIDTH, 4), experts=nn.ModuleList(_mlp() for _ in range(4))),
        _rows,
    ),
    "own-checkpoint": (lambda: Applied(_checkpointed, first=_mlp(), last=_mlp()), _rows),
    "in-place": (lambda: Applied(_in_place, layer=_linear()), _rows),
    "einsum": (lambda: Applied(_einsum, layer=_linear()), _sequence),
    "scatter": (lambda: Applied(_scatter, layer=_linear()), _rows),
    "running-mean": (lambda: Applied(_running, layer=_linear(), mean=torch.zeros(WIDTH)), _rows),
    "weight-norm": (
        lambda: Applied(_weights_of_weights, layer=_linear(), scale=nn.Parameter(torch.ones(WIDTH, 1))),
        _rows,
    ),
    "spectral-norm": (
        lambda: Applied(lambda m, x: m.net(x), net=nn.utils.parametrizations.spectral_norm(_linear())),
        _rows,
    ),
    "vector-quantized": (
        lambda: Applied(_quantized, layer=_linear(), codes=nn.Parameter(torch.randn(6, WIDTH))),
        _rows,
    ),
    "mixed-types": (lambda: Applied(_mixed_types, first=_linear(), last=_linear()), _rows),
    "fourier": (lambda: Applied(_complex, layer=_linear()), _rows),
    "where": (lambda: Applied(_early_exit, first=_linear(), last=_linear()), _rows),
    "bilinear": (lambda: Applied(lambda m, x: m.net(x, x), net=nn.Bilinear(WIDTH, WIDTH, 8)), _rows),
    "double": (lambda: Applied(lambda m, x: m.net(x.double()), net=_mlp().double()), _rows),
    "bfloat16": (lambda: Applied(lambda m, x: m.net(x.bfloat16()), net=_mlp().bfloat16()), _rows),
}


def _case(name: str) -> Case:
    def build() -> Training:
        torch.manual_seed(0)
        make, batch = MODELS[name]
        model = make()
        return Training(model, batch(), adam(model))

    return Case(name, "construction", build)


CONSTRUCTIONS = [_case(name) for name in MODELS]
