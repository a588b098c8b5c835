"""Make a built-in target: model, batch and optimizer.

This file has the models that need only torch, a plain transformer encoder and a U-Net; `from_transformers`
has the others.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from lowtide.errors import TargetError
from lowtide.generators import generators_kept
from lowtide.zoo import from_transformers
from lowtide.zoo.from_transformers import Batch
from lowtide.zoo.targets import Entry, find_entry


class EncoderModel(nn.Module):
    """Token and learned position embeddings, `num_layers` of `nn.TransformerEncoderLayer`, a linear head.

    Called with tokens and labels it returns the mean cross-entropy, a scalar.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        length: int,
        width: int,
        num_layers: int,
        num_heads: int,
        feed_forward: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(width, num_heads, feed_forward, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.dropout(self.tokens(tokens) + self.positions(positions))
        logits = self.head(self.encoder(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build_encoder(entry: Entry, batch_size: int) -> tuple[nn.Module, Batch]:
    length = entry.sequence_length
    assert length is not None
    sizes = {"vocabulary": 30_000, "width": 512, "num_layers": 6, "num_heads": 8, "feed_forward": 2048}
    if entry.tiny:
        sizes = {"vocabulary": 512, "width": 64, "num_layers": 3, "num_heads": 4, "feed_forward": 128}
    model, vocabulary = EncoderModel(length=length, dropout=0.1, **sizes), sizes["vocabulary"]
    shape = (batch_size, length)
    return model, {
        "tokens": torch.randint(0, vocabulary, shape),
        "labels": torch.randint(0, vocabulary, shape),
    }


def _double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """A U-Net: the features of each depth are live until the decoder reads them, so live ranges are long.

    Called with images and a class for every pixel, it returns the mean cross-entropy, a scalar.
    """

    def __init__(self, *, width: int, num_levels: int, num_classes: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(num_levels + 1)]
        self.first = _double_convolution(3, width)
        self.down = nn.ModuleList(_double_convolution(a, b) for a, b in pairwise(widths))
        ups = list(pairwise(reversed(widths)))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in ups)
        self.up = nn.ModuleList(_double_convolution(2 * b, b) for _, b in ups)
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.first(images)
        skips = []
        for down in self.down:
            skips.append(hidden)
            hidden = down(functional.max_pool2d(hidden, 2))
        for grow, up in zip(self.grow, self.up, strict=True):
            hidden = up(torch.cat([skips.pop(), grow(hidden)], dim=1))
        return functional.cross_entropy(self.head(hidden), labels)


def build_unet(entry: Entry, batch_size: int) -> tuple[nn.Module, Batch]:
    size = entry.image_size
    assert size is not None
    width, num_classes = (8, 4) if entry.tiny else (64, 21)
    model = UNet(width=width, num_levels=4, num_classes=num_classes)
    return model, {
        "images": torch.randn(batch_size, 3, size, size),
        "labels": torch.randint(0, num_classes, (batch_size, size, size)),
    }


_FAMILIES: dict[str, Callable[[Entry, int], tuple[nn.Module, Batch]]] = {
    "resnet": from_transformers.build_resnet,
    "bert": from_transformers.build_bert,
    "bert-mlm": from_transformers.build_bert_mlm,
    "gpt2": from_transformers.build_gpt2,
    "vit": from_transformers.build_vit,
    "transformer": build_encoder,
    "unet": build_unet,
}


class Built(NamedTuple):
    model: nn.Module
    batch: Batch
    optimizer: torch.optim.Optimizer | None


def build(
    name: str,
    *,
    batch_size: int,
    image_size: int | None = None,
    sequence_length: int | None = None,
    optimizer: str = "adam",
    seed: int = 0,
    device: Any = "cpu",
) -> Built:
    """The built-in target `name`, in training mode.

    The same arguments give the same weights and the same batch; torch's global generators do not
    change. `make_optimizer` reads `optimizer`.
    """
    entry = find_entry(name).with_size(image_size=image_size, sequence_length=sequence_length)
    if batch_size < 1:
        raise TargetError(f"the batch size must be at least 1, not {batch_size}")
    with generators_kept():
        torch.default_generator.manual_seed(seed)  # all is drawn on the CPU: no accelerator has to start
        model, batch = _FAMILIES[entry.family](entry, batch_size)
    model = model.train().to(device)
    batch = {key: value.to(device) for key, value in batch.items()}
    return Built(model, batch, make_optimizer(optimizer, model))


_KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"lr": 1e-3}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
}
_VARIANTS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "single": {"foreach": False},
}


def make_optimizer(text: str, model: nn.Module) -> torch.optim.Optimizer | None:
    """`adam`, `adamw`, `sgd` (momentum 0.9) or `none`; a variant follows a colon, as in `adam:fused`.

    Variants: `foreach`, `fused`, `single` (one parameter at a time). Without one, torch chooses.
    """
    name, _, variant = text.partition(":")
    if text == "none":
        return None
    if name not in _KINDS or (variant or "fused") not in _VARIANTS:
        raise TargetError(
            f"cannot read the optimizer '{text}': write {', '.join(_KINDS)} or none, "
            f"with a variant ({', '.join(_VARIANTS)}) after a colon if wanted, as in adam:fused"
        )
    kind, options = _KINDS[name]
    return kind(model.parameters(), **options, **_VARIANTS.get(variant, {}))
