"""fair-esm: a small protein language model learns masked residues."""

import torch
from esm.data import Alphabet
from esm.model.esm2 import ESM2
from torch import nn

from client_runs.run import Run

LIBRARY = "fair-esm"
LOOP = "ESM-2 protein language model, masked residues"


def train(run: Run) -> None:
    alphabet = Alphabet.from_architecture("ESM-1b")
    model = ESM2(num_layers=3, embed_dim=64, attention_heads=4, alphabet=alphabet)
    residues = [alphabet.get_idx(letter) for letter in "ACDEFGHIKLMNPQRSTVWY"]
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-4)

    def sequences() -> torch.Tensor:
        return torch.tensor(residues)[torch.randint(0, 20, (4, 64))]

    model = run.plan(model, sequences(), optimizer=optimizer)
    for _ in range(run.steps):
        tokens = sequences()
        masked = torch.rand(tokens.shape) < 0.15
        logits = model(tokens.masked_fill(masked, alphabet.mask_idx))["logits"]
        loss = nn.functional.cross_entropy(logits[masked], tokens[masked])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
