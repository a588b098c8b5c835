"""The loop of nanoGPT: the model returns logits and loss, and both names live on in the next step."""

import torch
from torch import nn

from client_runs.run import Run

LIBRARY = "torch"
LOOP = "`logits, loss = model(X, Y)`, as nanoGPT has it"


class Gpt(nn.Module):
    def __init__(self, vocabulary: int = 500, width: int = 64, length: int = 64) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        hidden = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        logits = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    data = torch.randint(0, 500, (8, 65))
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


def train(run: Run) -> None:
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    X, Y = get_batch()
    model = run.plan(model, (X, Y), optimizer=optimizer)
    for _ in range(run.steps):
        _logits, loss = model(X, Y)
        X, Y = get_batch()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
