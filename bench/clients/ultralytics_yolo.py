"""ultralytics: YOLOv8n for detection, called with the batch as a dict, as its trainer does."""

import torch
from ultralytics.cfg import get_cfg
from ultralytics.nn.tasks import DetectionModel

from client_runs.run import Run

LIBRARY = "ultralytics"
LOOP = "YOLOv8n, `loss, items = model(batch)`"


def pictures() -> dict[str, torch.Tensor]:
    return {
        "img": torch.rand(2, 3, 64, 64),
        "cls": torch.randint(0, 4, (4, 1)).float(),
        "bboxes": torch.rand(4, 4) * 0.4 + 0.2,
        "batch_idx": torch.tensor([0.0, 0.0, 1.0, 1.0]),
    }


def train(run: Run) -> None:
    model = DetectionModel("yolov8n.yaml", nc=4, verbose=False)
    model.args = get_cfg()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True)
    model = run.plan(model, (pictures(),), optimizer=optimizer)
    for _ in range(run.steps):
        loss, _items = model(pictures())
        loss.sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
        optimizer.step()
        optimizer.zero_grad()
