"""torchvision: RetinaNet, whose head runs once per level of the pyramid; it returns its losses."""

import torch
from torchvision.models.detection import retinanet_resnet50_fpn

from client_runs.run import Run

LIBRARY = "torchvision"
LOOP = "RetinaNet detector, dict of losses"

Batch = tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]


def pictures() -> Batch:
    images = [torch.rand(3, 96, 96) for _ in range(2)]
    boxes = torch.tensor([[8.0, 8.0, 40.0, 48.0], [30.0, 20.0, 90.0, 80.0]])
    return images, [{"boxes": boxes + torch.rand(1), "labels": torch.randint(1, 5, (2,))} for _ in images]


def train(run: Run) -> None:
    model = retinanet_resnet50_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=5,
        min_size=96,
        max_size=96,
        trainable_backbone_layers=5,
    )
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    model = run.plan(model, pictures(), optimizer=optimizer)
    for _ in range(run.steps):
        images, targets = pictures()
        optimizer.zero_grad()
        losses = sum(model(images, targets).values())
        losses.backward()
        optimizer.step()
