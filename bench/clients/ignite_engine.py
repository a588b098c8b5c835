"""ignite: a supervised trainer with handlers."""

import torch
from ignite.engine import Events, create_supervised_trainer
from ignite.handlers import TerminateOnNan
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from client_runs.run import Run

LIBRARY = "pytorch-ignite"
LOOP = "convolutions, create_supervised_trainer"


def train(run: Run) -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 10),
    )
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    count = run.steps * 16
    data = TensorDataset(torch.randn(count, 1, 28, 28), torch.randint(0, 10, (count,)))
    model = run.plan(model, torch.randn(16, 1, 28, 28), optimizer=optimizer)
    trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss(), device="cpu")
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    trainer.run(DataLoader(data, batch_size=16, shuffle=True), max_epochs=1)
