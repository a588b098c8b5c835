"""torchvision: ResNet-18, trained as its classification reference does."""

import torch
from torch import nn
from torchvision.models import resnet18

from client_runs.run import Run

LIBRARY = "torchvision"
LOOP = "ResNet-18, SGD"


def train(run: Run) -> None:
    model = resnet18(num_classes=10)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    model = run.plan(model, torch.randn(16, 3, 64, 64), optimizer=optimizer)
    for _ in range(run.steps):
        image, target = torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
