"""Random models: layer graphs that mix whatever training code mixes, all of them valid in eager."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH = 96, 32
IMAGES, CHANNELS, SIDE = 3, 8, 12


@dataclass(frozen=True)
class Layer:
    """One step of a forward pass: `op` on the newest value, and on an older one where it takes two.

    `older` counts back from the newest value; `shared` uses the modules of the last layer of this op.
    """

    op: str
    older: int
    shared: bool
    number: int


@dataclass(frozen=True)
class Design:
    """A model in words; `images` says which ops there are, `ending` what forward returns."""

    images: bool
    layers: tuple[Layer, ...]
    ending: str

    def build(self) -> "RandomModel":
        return RandomModel(self)

    def batch(self) -> torch.Tensor:
        return torch.randn(IMAGES, CHANNELS, SIDE, SIDE) if self.images else torch.randn(ROWS, WIDTH)


def _noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn_like(x) * x.sigmoid()


def _stochastic_depth(x: torch.Tensor) -> torch.Tensor:
    keep = torch.bernoulli(torch.full((x.shape[0],) + (1,) * (x.dim() - 1), 0.8))
    return x * keep / 0.8


def _views(x: torch.Tensor) -> torch.Tensor:
    return x.view(x.shape[0], 2, -1).transpose(1, 2).reshape(x.shape)


def _halves(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=1)
    return torch.cat([right * 2, left], dim=1)


def _largest(x: torch.Tensor) -> torch.Tensor:
    top = x.topk(4, dim=1)
    return torch.zeros_like(x).scatter(1, top.indices, top.values) + x


def _where(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > x.mean(), x, x.square())


def _attention(x: torch.Tensor) -> torch.Tensor:
    heads = x.view(4, -1, 4, x.shape[1] // 4).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.0)
    return mixed.transpose(1, 2).reshape(x.shape)


PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "relu": F.relu,
    "noise": _noise,
    "rrelu": lambda x: F.rrelu(x, training=True),
    "stochastic-depth": _stochastic_depth,
    "views": _views,
    "halves": _halves,
    "largest": _largest,
    "where": _where,
    "softmax": lambda x: torch.softmax(x, dim=1),
    "pool": lambda x: F.max_pool2d(x, 3, stride=1, padding=1),
    "attention": _attention,
}
MODULES: dict[str, Callable[[bool], nn.Module]] = {
    "mix": lambda images: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) if images else nn.Linear(WIDTH, WIDTH),
    "batch-norm": lambda images: nn.BatchNorm2d(CHANNELS) if images else nn.BatchNorm1d(WIDTH),
    "norm": lambda images: nn.GroupNorm(2, CHANNELS) if images else nn.LayerNorm(WIDTH),
    "dropout": lambda images: nn.Dropout(0.3),
    "dropout-of-channels": lambda images: nn.Dropout2d(0.15),
    "join": lambda images: nn.Conv2d(2 * CHANNELS, CHANNELS, 1) if images else nn.Linear(2 * WIDTH, WIDTH),
}
OF_TWO = {
    "add": lambda module, x, other: x + other,
    "multiply": lambda module, x, other: x * other,
    "join": lambda module, x, other: module(torch.cat([x, other], dim=1)),
    "mix-add-in-place": lambda module, x, other: module(x).add_(other),
}
IN_PLACE = {
    "mix-relu-in-place": lambda module, x: F.relu(module(x), inplace=True),
    "mix-scale-in-place": lambda module, x: module(x).mul_(0.5).tanh_(),
}
BOTH = (
    *("mix", "batch-norm", "norm", "dropout", "join", "mix-add-in-place", *IN_PLACE, "count"),
    *("gelu", "silu", "tanh", "relu", "noise", "rrelu", "stochastic-depth", "halves", "where", "softmax"),
    *("add", "multiply"),
)
ROW_OPS = (*BOTH, "views", "largest", "attention")
IMAGE_OPS = (*BOTH, "pool", "dropout-of-channels")


class RandomModel(nn.Module):
    def __init__(self, design: Design) -> None:
        super().__init__()
        self.design = design
        self.parts = nn.ModuleDict()
        self.register_buffer("calls", torch.ones(()))
        self.part_of: dict[int, str] = {}
        last: dict[str, str] = {}
        for layer in design.layers:
            kind = "mix" if layer.op.startswith("mix") else layer.op
            if kind not in MODULES:
                continue
            if not (layer.shared and kind in last):
                last[kind] = f"{kind}_{layer.number}"
                self.parts[last[kind]] = MODULES[kind](design.images)
            self.part_of[layer.number] = last[kind]
        self.head = MODULES["mix"](design.images)

    def forward(self, x: torch.Tensor) -> Any:
        values = [x]
        for layer in self.design.layers:
            values.append(self._layer(layer, values))
        result = self.head(values[-1])
        if self.design.ending == "loss":
            return {"loss": result.square().mean(), "logits": result}
        return (result, values[-1].mean()) if self.design.ending == "pair" else result

    def _layer(self, layer: Layer, values: list[torch.Tensor]) -> torch.Tensor:
        x, other = values[-1], values[max(0, len(values) - 1 - layer.older)]
        part = self.parts[self.part_of[layer.number]] if layer.number in self.part_of else None
        if layer.op == "count":
            self.calls.mul_(1.01)
            return x + self.calls
        if layer.op in OF_TWO:
            return OF_TWO[layer.op](part, x, other)
        if layer.op in IN_PLACE:
            return IN_PLACE[layer.op](part, x)
        return PLAIN[layer.op](x) if part is None else part(x)


@st.composite
def designs(draw: st.DrawFn, *, images: bool, max_layers: int = 10) -> Design:
    ops = st.sampled_from(IMAGE_OPS if images else ROW_OPS)
    drawn = draw(st.lists(st.tuples(ops, st.integers(1, 6), st.booleans()), min_size=4, max_size=max_layers))
    layers = tuple(Layer(op, older, shared, number) for number, (op, older, shared) in enumerate(drawn))
    return Design(images, layers, draw(st.sampled_from(["sum", "loss", "pair"])))
