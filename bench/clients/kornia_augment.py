"""kornia: random augmentations as the first layers of the model, drawn anew in every step."""

import torch
from kornia.augmentation import AugmentationSequential, RandomAffine, RandomHorizontalFlip
from torch import nn

from client_runs.run import Run

LIBRARY = "kornia"
LOOP = "augmentation inside of the model"


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.augment = AugmentationSequential(RandomHorizontalFlip(p=0.5), RandomAffine(15.0, p=0.5))
        self.network = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            images = self.augment(images)
        return self.network(images)


def train(run: Run) -> None:
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model = run.plan(model, torch.rand(8, 3, 32, 32), optimizer=optimizer)
    for _ in range(run.steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.rand(8, 3, 32, 32)), torch.randint(0, 10, (8,)))
        loss.backward()
        optimizer.step()
