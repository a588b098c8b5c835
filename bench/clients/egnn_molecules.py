"""egnn-pytorch: an equivariant network on atoms and their places."""

import torch
from egnn_pytorch import EGNN_Network
from torch import nn

from client_runs.run import Run

LIBRARY = "egnn-pytorch"
LOOP = "equivariant network on molecules"


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = EGNN_Network(num_tokens=10, dim=32, depth=3, num_nearest_neighbors=8, norm_coors=True)
        self.output = nn.Linear(32, 1)

    def forward(self, atoms: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        features, _places = self.network(atoms, places)
        return self.output(features).sum((1, 2))


def train(run: Run) -> None:
    model = Energy()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model = run.plan(model, (torch.randint(0, 10, (4, 24)), torch.randn(4, 24, 3)), optimizer=optimizer)
    for _ in range(run.steps):
        atoms, places, energies = torch.randint(0, 10, (4, 24)), torch.randn(4, 24, 3), torch.randn(4)
        optimizer.zero_grad()
        loss = nn.functional.l1_loss(model(atoms, places), energies)
        loss.backward()
        optimizer.step()
