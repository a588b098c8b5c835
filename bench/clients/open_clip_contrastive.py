"""open_clip: images and texts in one model, by its contrastive loss."""

import torch
from open_clip.loss import ClipLoss
from open_clip.model import CLIP

from client_runs.run import Run

LIBRARY = "open_clip_torch"
LOOP = "CLIP, contrastive loss"


def train(run: Run) -> None:
    model = CLIP(
        embed_dim=64,
        vision_cfg={"layers": 2, "width": 64, "patch_size": 8, "image_size": 32, "head_width": 32},
        text_cfg={"context_length": 16, "vocab_size": 200, "width": 64, "heads": 2, "layers": 2},
    )
    loss_fn = ClipLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model = run.plan(model, (torch.rand(8, 3, 32, 32), torch.randint(1, 200, (8, 16))), optimizer=optimizer)
    for _ in range(run.steps):
        images, texts = torch.rand(8, 3, 32, 32), torch.randint(1, 200, (8, 16))
        loss = loss_fn(*model(images, texts)[:3])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
