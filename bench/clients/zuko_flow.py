"""zuko: a normalizing flow; the model returns a distribution, and the loss is its log-density."""

import torch
import zuko
from torch import nn

from client_runs.run import Run

LIBRARY = "zuko"
LOOP = "neural spline flow, log-density"


class Density(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flow = zuko.flows.NSF(features=4, context=3, transforms=2, hidden_features=(64, 64))

    def forward(self, values: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        return -self.flow(context).log_prob(values).mean()


def train(run: Run) -> None:
    model = Density()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model = run.plan(model, (torch.randn(128, 4), torch.randn(128, 3)), optimizer=optimizer)
    for _ in range(run.steps):
        optimizer.zero_grad()
        loss = model(torch.randn(128, 4), torch.randn(128, 3))
        loss.backward()
        optimizer.step()
