"""A U-Net: every level's features wait for the way back up, so their lives are long."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from lowtide.zoo.catalog import Entry


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
