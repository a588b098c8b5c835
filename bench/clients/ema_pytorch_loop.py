"""ema-pytorch: an averaged copy of the model beside the one that trains."""

import torch
from ema_pytorch import EMA
from torch import nn

from client_runs.run import Run

LIBRARY = "ema-pytorch"
LOOP = "perceptron with an averaged copy"


def train(run: Run) -> None:
    model = nn.Sequential(nn.Linear(128, 512), nn.LayerNorm(512), nn.GELU(), nn.Linear(512, 512), nn.GELU())
    model.append(nn.Linear(512, 128))
    ema = EMA(model, beta=0.99, update_after_step=1, update_every=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model = run.plan(model, torch.randn(512, 128), optimizer=optimizer)
    for _ in range(run.steps):
        values = torch.randn(512, 128)
        loss = nn.functional.mse_loss(model(values), values)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
    run.models.append(ema)
