"""Ten small models of different kinds for `bench/accelerator.py`: factories, as the command line takes them.

Each is small, and its batch large enough that activations are most of its peak.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lowtide.zoo.build import build

Made = tuple[nn.Module, Any, torch.optim.Optimizer]


def _builtin(name: str, batch_size: int, **size: int) -> Made:
    model, batch, _ = build(name, batch_size=batch_size, optimizer="none", **size)
    return _made(model, batch)


def _made(model: nn.Module, batch: Any) -> Made:
    return model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3)


def resnet(batch_size: int) -> Made:
    return _builtin("tiny-resnet152", batch_size, image_size=64)


def unet(batch_size: int) -> Made:
    return _builtin("tiny-unet", batch_size, image_size=64)


def encoder(batch_size: int) -> Made:
    return _builtin("tiny-transformer", batch_size, sequence_length=64)


def gpt2(batch_size: int) -> Made:
    return _builtin("tiny-gpt2", batch_size, sequence_length=64)


def vit(batch_size: int) -> Made:
    return _builtin("tiny-vit", batch_size, image_size=64)


def llama(batch_size: int) -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=172, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    tokens = torch.randint(0, 512, (batch_size, 64))
    return _made(LlamaForCausalLM(config).train(), {"input_ids": tokens, "labels": tokens})


class Mixed(nn.Module):
    """A model under autocast in bfloat16, with its loss outside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        kind = next(iter(batch.values())).device.type
        with torch.autocast(kind, torch.bfloat16):
            loss: torch.Tensor = self.model(**batch).loss
        return loss.float()


def bert_in_bfloat16(batch_size: int) -> Made:
    model, batch, _ = _builtin("tiny-bert-base", batch_size, sequence_length=64)
    return _made(Mixed(model), batch)


class Tagger(nn.Module):
    """Two LSTM layers over embedded tokens, a tag for each."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(512, 64)
        self.layers = nn.LSTM(64, 96, num_layers=2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 64))

    def forward(self, tokens: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.layers(self.tokens(tokens))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), tags.flatten())


def lstm(batch_size: int) -> Made:
    shape = (batch_size, 32)
    return _made(Tagger(), {"tokens": torch.randint(0, 512, shape), "tags": torch.randint(0, 64, shape)})


class Experts(nn.Module):
    """A mixture: each token goes to its two best experts, weighted; all experts have equal shapes."""

    def __init__(self, width: int, num_experts: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(num_experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(self.norm(x)).softmax(-1)
        best, chosen = scores.topk(2, dim=-1)
        weights = torch.zeros_like(scores).scatter(-1, chosen, best)
        parts = [expert(x) * weights[..., i : i + 1] for i, expert in enumerate(self.experts)]
        return x + torch.stack(parts).sum(0)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Experts(64) for _ in range(3)))

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.layers(x), wanted)


def experts(batch_size: int) -> Made:
    x = torch.randn(batch_size, 64, 64)
    return _made(Mixture(), {"x": x, "wanted": torch.randn_like(x)})


class Autoencoder(nn.Module):
    """Strided convolutions and back, with batch norm and leaky ReLUs, as in a DCGAN."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        sizes = [3, width, 2 * width, 4 * width]
        down = [self._block(nn.Conv2d, a, b) for a, b in pairwise(sizes)]
        up = [self._block(nn.ConvTranspose2d, b, a) for a, b in pairwise(sizes[1:])][::-1]
        self.body = nn.Sequential(*down, *up, nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh())

    @staticmethod
    def _block(layer: type[nn.Module], inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            layer(inputs, outputs, 4, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.body(images), images)


def autoencoder(batch_size: int) -> Made:
    return _made(Autoencoder(), {"images": torch.randn(batch_size, 3, 64, 64)})


MODELS = {
    "resnet": 16,
    "unet": 8,
    "autoencoder": 32,
    "vit": 16,
    "encoder": 16,
    "bert_in_bfloat16": 16,
    "gpt2": 16,
    "llama": 16,
    "experts": 16,
    "lstm": 32,
}
"""The batch size of each factory."""
