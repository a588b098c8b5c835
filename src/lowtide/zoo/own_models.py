"""A plain encoder-only transformer with an output head over its vocabulary.

A U-Net: every level's features wait for the way back up, so their lives are long.
"""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from lowtide.zoo.catalog import Entry


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


def build_encoder(entry: Entry, batch_size: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    length = entry.sequence_length
    assert length is not None
    if entry.tiny:
        vocabulary, width, num_layers, num_heads, feed_forward = 512, 64, 3, 4, 128
    else:
        vocabulary, width, num_layers, num_heads, feed_forward = 30_000, 512, 6, 8, 2048
    model = EncoderModel(
        vocabulary=vocabulary,
        length=length,
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        feed_forward=feed_forward,
        dropout=0.1,
    )
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
    """Called with images and a class for every pixel, it returns the mean cross-entropy, a scalar."""

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


def build_unet(entry: Entry, batch_size: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    size = entry.image_size
    assert size is not None
    width, num_classes = (8, 4) if entry.tiny else (64, 21)
    model = UNet(width=width, num_levels=4, num_classes=num_classes)
    return model, {
        "images": torch.randn(batch_size, 3, size, size),
        "labels": torch.randint(0, num_classes, (batch_size, size, size)),
    }
