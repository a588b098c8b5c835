"""deepctr-torch: DeepFM on clicks, with embeddings of sparse features."""

import numpy
import torch
from deepctr_torch.inputs import DenseFeat, SparseFeat
from deepctr_torch.models import DeepFM
from torch import nn

from client_runs.run import Run

LIBRARY = "deepctr-torch"
LOOP = "DeepFM, recommendation"


def train(run: Run) -> None:
    columns = [SparseFeat(f"kind{each}", 50, embedding_dim=16) for each in range(8)]
    columns += [DenseFeat(f"number{each}", 1) for each in range(4)]
    model = DeepFM(columns, columns, task="binary", dnn_hidden_units=(256, 128), dnn_dropout=0.1, seed=7)
    model.train()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)

    def clicks() -> torch.Tensor:
        kinds, numbers = numpy.random.randint(0, 50, (256, 8)), numpy.random.rand(256, 4)
        return torch.tensor(numpy.concatenate([kinds, numbers], axis=1), dtype=torch.float32)

    model = run.plan(model, clicks(), optimizer=optimizer)
    for _ in range(run.steps):
        rows, labels = clicks(), torch.randint(0, 2, (256,)).float()
        optimizer.zero_grad()
        predicted = model(rows).squeeze()
        loss = nn.functional.binary_cross_entropy(predicted, labels) + model.get_regularization_loss().sum()
        loss.backward()
        optimizer.step()
