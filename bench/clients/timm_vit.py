"""timm: a vision transformer of its zoo, with its optimizer, schedule, mixup and label smoothing."""

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler

from client_runs.run import Run

LIBRARY = "timm"
LOOP = "ViT with drop path, mixup, AdamW"


def train(run: Run) -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, depth=4, num_classes=10, drop_path_rate=0.1, pretrained=False
    )
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    schedule = CosineLRScheduler(optimizer, t_initial=run.steps, warmup_t=2)
    mixup, loss_fn = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=10), SoftTargetCrossEntropy()
    model = run.plan(model, torch.randn(32, 3, 64, 64), optimizer=optimizer)
    for step in range(run.steps):
        images, targets = mixup(torch.randn(32, 3, 64, 64), torch.randint(0, 10, (32,)))
        output = model(images)
        loss = loss_fn(output, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step(step + 1)
