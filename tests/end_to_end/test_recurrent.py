"""A recurrent layer behind an embedding, its usual place: what eager runs is what is captured."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide

WORDS, WIDTH = 40, 16

pytestmark = pytest.mark.slow


class Tagger(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True, **options)
        directions = 2 if options.get("bidirectional") else 1
        self.head = nn.Linear(WIDTH * directions, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layer(self.embedding(x))[0]).flatten(0, 1), x.flatten())


@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 2, "dropout": 0.3}, {"bidirectional": True}, {"bias": False}],
    ids=["plain", "two layers", "both ways", "no bias"],
)
def test_an_lstm_behind_an_embedding_is_exact(options: dict) -> None:
    torch.manual_seed(0)
    plain, batch = Tagger(**options), torch.randint(0, WORDS, (6, 9))
    planned = copy.deepcopy(plain)
    found = lowtide.profile(planned, batch)
    layers = [node for node in found.nodes if node.op == "lowtide.recurrent_layer"]
    assert len(layers) == plain.layer.num_layers * (2 if plain.layer.bidirectional else 1)
    assert len(found.nodes) < 250, "not a cell for every step"
    found.plan(found.floor_bytes).apply(planned)
    for model in (plain, planned):
        torch.manual_seed(1)
        model(batch).backward()
    pairs = zip(plain.parameters(), planned.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
