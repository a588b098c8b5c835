"""PyTorch Geometric: the GCN of its introduction on one graph, all nodes at once."""

import torch
from torch import nn
from torch_geometric.nn import GCNConv

from client_runs.run import Run

LIBRARY = "torch-geometric"
LOOP = "GCN, full batch"


class Gcn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(64, 128), GCNConv(128, 7)

    def forward(self, values: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        values = nn.functional.relu(self.first(values, edges))
        values = nn.functional.dropout(values, training=self.training)
        return nn.functional.log_softmax(self.second(values, edges), dim=1)


def train(run: Run) -> None:
    values, edges = torch.randn(600, 64), torch.randint(0, 600, (2, 3000))
    labels = torch.randint(0, 7, (600,))
    model = Gcn()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    model = run.plan(model, (values, edges), optimizer=optimizer)
    for _ in range(run.steps):
        optimizer.zero_grad()
        loss = nn.functional.nll_loss(model(values, edges)[:140], labels[:140])
        loss.backward()
        optimizer.step()
