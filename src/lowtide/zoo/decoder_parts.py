"""The part of a decoder that one GPU of a mesh computes, for tracing on fake tensors.

    tokens ─ embedding ─ reduce-scatter ─┬─ norm ─ all-gather ─ heads / tp ─ reduce-scatter ─ + ─┬─ ...
                                         └───────────────────────────────────────────────────────┘

Tensor parallel with parts of the sequence: layers have 1 / tp of their heads, hidden features and words, and
norms and sums have 1 / tp of the tokens. Context parallel: 1 / cp of the tokens everywhere. A stage of a
pipeline has some of the blocks: the first has the embedding, the last has head and loss. Without tensor and
context parallelism this is the plain model.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowtide.zoo.decoders import DecoderSize
from lowtide.zoo.mesh_ops import gather_tokens, ring_attention, scatter_tokens, send

Wrap = Callable[..., Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSize:
    """What one GPU has: `blocks` of the model, 1 / `tensor` of each layer, `length` tokens / `context`."""

    model: DecoderSize
    length: int
    blocks: int
    tensor: int = 1
    context: int = 1
    is_first: bool = True
    is_last: bool = True

    @property
    def tokens(self) -> int:
        return self.length // self.context


class DecoderBlock(nn.Module):
    """`wrap` calls what the block computes, as a checkpoint would."""

    def __init__(self, size: PartSize, *, wrap: Wrap | None = None) -> None:
        super().__init__()
        self.wrap = wrap
        model = size.model
        self.size = size
        self.heads, self.key_heads = model.heads // size.tensor, model.key_heads // size.tensor
        self.head_width = model.width // model.heads
        hidden, bias = model.hidden // size.tensor, not model.is_gated
        norm = nn.RMSNorm if model.is_gated else nn.LayerNorm
        self.attention_norm = norm(model.width)
        self.query = nn.Linear(model.width, self.heads * self.head_width, bias=bias)
        self.key = nn.Linear(model.width, self.key_heads * self.head_width, bias=bias)
        self.value = nn.Linear(model.width, self.key_heads * self.head_width, bias=bias)
        self.out = nn.Linear(self.heads * self.head_width, model.width, bias=bias)
        self.norm = norm(model.width)
        if model.is_gated:
            self.gate = nn.Linear(model.width, hidden, bias=False)
        self.up = nn.Linear(model.width, hidden, bias=bias)
        self.down = nn.Linear(hidden, model.width, bias=bias)

    def forward(self, x: Tensor, rotations: Tensor | None = None) -> Tensor:
        return self._compute(x, rotations) if self.wrap is None else self.wrap(self._compute, x, rotations)

    def _compute(self, x: Tensor, rotations: Tensor | None) -> Tensor:
        x = x + self._scattered(self.out(self._attention(self._gathered(self.attention_norm(x)), rotations)))
        y: Tensor = x + self._scattered(self.down(self._hidden(self._gathered(self.norm(x)))))
        return y

    def _attention(self, x: Tensor, rotations: Tensor | None) -> Tensor:
        query = _heads(self.query(x), self.heads)
        key, value = _heads(self.key(x), self.key_heads), _heads(self.value(x), self.key_heads)
        if rotations is not None:
            query, key = _rotated(query, rotations), _rotated(key, rotations)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        if self.size.context > 1:
            mixed = ring_attention(query, key, value, self.size.context)[0]
        else:
            mixed = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=self.heads > self.key_heads
            )
        flat: Tensor = mixed.transpose(1, 2).reshape(*x.shape[:2], -1)
        return flat

    def _hidden(self, x: Tensor) -> Tensor:
        up: Tensor = self.up(x)
        if not self.size.model.is_gated:
            return functional.gelu(up)
        return torch.mul(functional.silu(self.gate(x)), up)

    def _gathered(self, x: Tensor) -> Tensor:
        return _gathered(x, self.size.tensor)

    def _scattered(self, x: Tensor) -> Tensor:
        return _scattered(x, self.size.tensor)


def _gathered(x: Tensor, parts: int) -> Tensor:
    whole: Tensor = gather_tokens(x, parts) if parts > 1 else x
    return whole


def _scattered(x: Tensor, parts: int) -> Tensor:
    part: Tensor = scatter_tokens(x, parts) if parts > 1 else x
    return part


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:2], heads, -1)


def _rotated(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotary positions, computed in float32."""
    cosine, sine = rotations.unbind(0)
    real, imaginary = x.float().view(*x.shape[:-1], -1, 2).unbind(-1)
    turned = torch.stack((real * cosine - imaginary * sine, real * sine + imaginary * cosine), -1)
    return turned.flatten(-2).to(x.dtype)


class DecoderPart(nn.Module):
    """Called with tokens (a first stage) or the output of the stage before; returns the loss, or in a stage
    that is not the last a number that stands for it."""

    def __init__(self, size: PartSize, *, wrap: Wrap | None = None) -> None:
        super().__init__()
        self.size = size
        model, words = size.model, -(-size.model.words // size.tensor)
        if size.is_first:
            self.words = nn.Embedding(words, model.width)
            if not model.is_gated:
                self.places = nn.Parameter(torch.zeros(size.tokens // size.tensor, model.width))
        self.blocks = nn.ModuleList(DecoderBlock(size, wrap=wrap) for _ in range(size.blocks))
        if size.is_last:
            self.norm = (nn.RMSNorm if model.is_gated else nn.LayerNorm)(model.width)
            self.head = nn.Linear(model.width, words, bias=False)

    def forward(self, x: Tensor, targets: Tensor, *rotations: Tensor) -> Tensor:
        if self.size.is_first:
            x = _scattered(self.words(x), self.size.tensor)
            if not self.size.model.is_gated:
                x = x + self.places
        for block in self.blocks:
            x = block(x, *rotations)
        if not self.size.is_last:
            sent: Tensor = send(x)
            return sent
        logits = self.head(_gathered(self.norm(x), self.size.tensor))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def part_batch(size: PartSize, micro_batch: int) -> tuple[Tensor, ...]:
    """What a stage is called with: tokens or the output of the stage before, targets, and the cosines and
    sines of rotary positions."""
    model = size.model
    targets = torch.zeros(micro_batch, size.tokens, dtype=torch.int64)
    x = torch.zeros_like(targets)
    if not size.is_first:
        shape = (micro_batch, size.tokens // size.tensor, model.width)
        x = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
    rotations = (2, size.tokens, 1, model.width // model.heads // 2)
    return (x, targets, *([torch.zeros(rotations, dtype=torch.float32)] if model.is_gated else ()))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make parameters in that dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
