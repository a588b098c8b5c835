"""vector-quantize-pytorch: an autoencoder with residual codebooks, some dropped by Python's random."""

import torch
from torch import nn
from vector_quantize_pytorch import ResidualVQ

from client_runs.run import Run

LIBRARY = "vector-quantize-pytorch"
LOOP = "ResidualVQ with quantize_dropout"


class Coder(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, width))
        self.quantize = ResidualVQ(
            dim=width, num_quantizers=4, codebook_size=64, quantize_dropout=True, kmeans_init=False
        )
        self.decode = nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Linear(256, 32))

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        quantized, _indices, commit = self.quantize(self.encode(values))
        return self.decode(quantized), commit.sum()


def train(run: Run) -> None:
    model = Coder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model = run.plan(model, torch.randn(8, 64, 32), optimizer=optimizer)
    for _ in range(run.steps):
        values = torch.randn(8, 64, 32)
        optimizer.zero_grad()
        output, commit = model(values)
        loss = nn.functional.l1_loss(output, values) + 10 * commit
        loss.backward()
        optimizer.step()
