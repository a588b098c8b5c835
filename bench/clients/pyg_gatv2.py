"""PyTorch Geometric: attention over edges of batches of graphs, pooled to one answer for each."""

import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATv2Conv, global_mean_pool

from client_runs.run import Run

LIBRARY = "torch-geometric"
LOOP = "GATv2 over batches of graphs"


class Gat(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sizes = [(16, width), (4 * width, width), (4 * width, width)]
        self.layers = nn.ModuleList(GATv2Conv(*size, heads=4, dropout=0.1) for size in sizes)
        self.output = nn.Linear(4 * width, 1)

    def forward(self, values: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = nn.functional.elu(layer(values, edges))
        return self.output(global_mean_pool(values, graph, size=8))


def train(run: Run) -> None:
    graphs = [
        Data(x=torch.randn(30, 16), edge_index=torch.randint(0, 30, (2, 120)), y=torch.randn(1, 1))
        for _ in range(run.steps * 8)
    ]
    loader = DataLoader(graphs, batch_size=8)
    model = Gat()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    first = next(iter(DataLoader(graphs[:8], batch_size=8)))
    model = run.plan(model, (first.x, first.edge_index, first.batch), optimizer=optimizer)
    del first
    for batch in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch.x, batch.edge_index, batch.batch), batch.y)
        loss.backward()
        optimizer.step()
