"""More models of bench/gpu.py, as factories of a batch size: video networks, a head over words, encoders."""

from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, dict[str, torch.Tensor]]

CLASSES = 400


def slow_only_4(batch_size: int) -> Built:
    return _SlowOnly(), _clips(batch_size, 4)


def slow_only_8(batch_size: int) -> Built:
    return _SlowOnly(), _clips(batch_size, 8)


class _SlowOnly(nn.Module):
    """ResNet-50 over clips: single frames first, three of them in the last two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv3d(3, 64, (1, 7, 7), (1, 2, 2), (0, 3, 3), bias=False),
            nn.BatchNorm3d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1)),
        )
        blocks: list[nn.Module] = []
        before = 64
        for stage, (depth, width) in enumerate(zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True)):
            for number in range(depth):
                stride = 2 if number == 0 and stage else 1
                blocks.append(_Bottleneck3d(before, width, stride, frames=3 if stage > 1 else 1))
                before = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(before, CLASSES)

    def forward(self, clips: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = self.blocks(self.stem(clips)).mean((2, 3, 4))
        return nn.functional.cross_entropy(self.head(self.dropout(found)), labels)


class _Bottleneck3d(nn.Module):
    def __init__(self, before: int, width: int, stride: int, *, frames: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv3d(before, width, (frames, 1, 1), padding=(frames // 2, 0, 0), bias=False),
            nn.BatchNorm3d(width),
            nn.ReLU(inplace=True),
            nn.Conv3d(width, width, (1, 3, 3), (1, stride, stride), (0, 1, 1), bias=False),
            nn.BatchNorm3d(width),
            nn.ReLU(inplace=True),
            nn.Conv3d(width, 4 * width, 1, bias=False),
            nn.BatchNorm3d(4 * width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv3d(before, 4 * width, 1, (1, stride, stride), bias=False), nn.BatchNorm3d(4 * width)
            )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.relu(self.body(x) + self.shortcut(x))
        return result


def _clips(batch_size: int, frames: int) -> dict[str, torch.Tensor]:
    clips = torch.empty(batch_size, 3, frames, 224, 224).normal_()
    return {"clips": clips, "labels": torch.zeros(batch_size, dtype=torch.int64)}


def segments(batch_size: int) -> Built:
    """ResNet-50 over three frames of each video, whose answers are averaged."""
    from transformers import ResNetConfig, ResNetModel

    frames = torch.empty(3 * batch_size, 3, 224, 224).normal_()
    batch = {"frames": frames, "labels": torch.zeros(batch_size, dtype=torch.int64)}
    return _Segments(ResNetModel(ResNetConfig())), batch


class _Segments(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.dropout, self.head = body, nn.Dropout(0.4), nn.Linear(2048, CLASSES)

    def forward(self, frames: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = self.body(frames).pooler_output.flatten(1).unflatten(0, (len(labels), -1)).mean(1)
        return nn.functional.cross_entropy(self.head(self.dropout(found)), labels)


def words_head(tokens: int) -> Built:
    """A last layer over 128,256 words and its loss; its input is trained, too."""
    return _Head(tokens), {"labels": torch.zeros(tokens, dtype=torch.int64)}


class _Head(nn.Module):
    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.states = nn.Parameter(torch.zeros(tokens, 4096))
        self.words = nn.Linear(4096, 128256, bias=False)

    def forward(self, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.words(self.states), labels)


def loss_alone(words: int) -> Built:
    """A loss over 16,384 rows of scores, which are trained."""
    return _Scores(words), {"labels": torch.zeros(16384, dtype=torch.int64)}


class _Scores(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(16384, words))

    def forward(self, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.scores, labels)


def biogpt(batch_size: int) -> Built:
    return _biogpt(batch_size, "eager")


def biogpt_fused(batch_size: int) -> Built:
    return _biogpt(batch_size, "sdpa")


def _biogpt(batch_size: int, attention: str) -> Built:
    from transformers import BioGptConfig, BioGptForCausalLM

    words = torch.zeros(batch_size, 256, dtype=torch.int64)
    return BioGptForCausalLM(BioGptConfig(attn_implementation=attention)), {"input_ids": words}


def beit(batch_size: int) -> Built:
    return _beit(batch_size, "eager")


def beit_fused(batch_size: int) -> Built:
    return _beit(batch_size, "sdpa")


def _beit(batch_size: int, attention: str) -> Built:
    """As the published checkpoint is, with a bias of attention for this size of image."""
    from transformers import BeitConfig, BeitForImageClassification

    options: dict[str, Any] = {"use_relative_position_bias": True, "drop_path_rate": 0.1, "num_labels": 1000}
    config = BeitConfig(image_size=(1048, 640), attn_implementation=attention, **options)
    return BeitForImageClassification(config), {"pixel_values": torch.zeros(batch_size, 3, 1048, 640)}
