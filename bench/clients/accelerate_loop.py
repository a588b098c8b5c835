"""accelerate: its loop with bf16 and accumulated gradients."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from client_runs.run import Run

LIBRARY = "accelerate"
LOOP = "convolutions, bf16, two micro-batches a step"


def train(run: Run) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(32 * 16 * 16, 10),
    )
    data = TensorDataset(torch.randn(run.steps * 16, 3, 16, 16), torch.randint(0, 10, (run.steps * 16,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 8, shuffle=True))
    model = run.plan(model, torch.randn(8, 3, 16, 16), optimizer=optimizer, accumulate=True)
    for images, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
