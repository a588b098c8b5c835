"""A plain encoder-only transformer with an output head over its vocabulary."""

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
