"""snntorch: spiking neurons over time, with a surrogate gradient."""

import snntorch
import torch
from torch import nn

from client_runs.run import Run

LIBRARY = "snntorch"
LOOP = "leaky spiking neurons, ten time steps"


class Spiking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 10)
        self.spike1, self.spike2 = snntorch.Leaky(beta=0.9), snntorch.Leaky(beta=0.9)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        memory1, memory2 = self.spike1.init_leaky(), self.spike2.init_leaky()
        potentials = []
        for _ in range(10):
            spikes, memory1 = self.spike1(self.first(values), memory1)
            _spikes, memory2 = self.spike2(self.second(spikes), memory2)
            potentials.append(memory2)
        return torch.stack(potentials)


def train(run: Run) -> None:
    model = Spiking()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.999))
    model = run.plan(model, torch.rand(64, 64), optimizer=optimizer)
    for _ in range(run.steps):
        values, labels = torch.rand(64, 64), torch.randint(0, 10, (64,))
        potentials = model(values)
        loss = sum(nn.functional.cross_entropy(each, labels) for each in potentials)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
