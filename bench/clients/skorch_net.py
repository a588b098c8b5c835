"""skorch: a classifier in the manner of scikit-learn; the module exists after `initialize`."""

import numpy
import torch
from skorch import NeuralNetClassifier
from torch import nn

from client_runs.run import Run

LIBRARY = "skorch"
LOOP = "perceptron, NeuralNetClassifier.fit"


class Perceptron(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(20, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, width), nn.ReLU()
        )
        self.output = nn.Linear(width, 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.output(self.layers(values)).softmax(-1)


def train(run: Run) -> None:
    inputs = numpy.random.randn(run.steps * 256, 20).astype("float32")
    labels = (inputs.sum(axis=1) > 0).astype("int64")
    net = NeuralNetClassifier(
        Perceptron, max_epochs=1, lr=0.1, batch_size=256, train_split=None, optimizer=torch.optim.Adam
    )
    net.initialize()
    run.plan(net.module_, torch.randn(256, 20), optimizer=net.optimizer_)
    net.partial_fit(inputs, labels)
