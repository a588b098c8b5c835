"""Lightning Fabric: one's own loop around a model that `fabric.setup` returns."""

import torch
from lightning.fabric import Fabric
from torch import nn

from client_runs.run import Run

LIBRARY = "lightning"
LOOP = "transformer encoder, Fabric, own loop"


def train(run: Run) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(model, optimizer)
    model = run.plan(model, torch.randn(8, 32, 64), optimizer=optimizer)
    for _ in range(run.steps):
        inputs, targets = torch.randn(8, 32, 64), torch.randn(8, 32, 64)
        loss = nn.functional.mse_loss(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
