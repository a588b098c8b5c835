"""pytorch-metric-learning: a miner picks triplets, so that the loss depends on the data."""

import torch
from pytorch_metric_learning.losses import TripletMarginLoss
from pytorch_metric_learning.miners import MultiSimilarityMiner
from torch import nn

from client_runs.run import Run

LIBRARY = "pytorch-metric-learning"
LOOP = "embeddings, mined triplets"


def train(run: Run) -> None:
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 32))
    mining, loss_func = MultiSimilarityMiner(epsilon=0.1), TripletMarginLoss(margin=0.2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model = run.plan(model, torch.randn(32, 64), optimizer=optimizer)
    for _ in range(run.steps):
        data, labels = torch.randn(32, 64), torch.randint(0, 8, (32,))
        optimizer.zero_grad()
        embeddings = model(data)
        loss = loss_func(embeddings, labels, mining(embeddings, labels))
        loss.backward()
        optimizer.step()
