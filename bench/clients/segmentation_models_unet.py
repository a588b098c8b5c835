"""segmentation-models-pytorch: a Unet with a ResNet encoder, and its Dice loss."""

import segmentation_models_pytorch as smp
import torch

from client_runs.run import Run

LIBRARY = "segmentation-models-pytorch"
LOOP = "Unet with a ResNet encoder, Dice loss"


def train(run: Run) -> None:
    model = smp.Unet(
        "resnet18", encoder_weights=None, in_channels=3, classes=1, decoder_channels=(64, 32, 16, 8, 8)
    )
    loss_fn = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    model = run.plan(model, torch.rand(4, 3, 64, 64), optimizer=optimizer)
    for _ in range(run.steps):
        images, masks = torch.rand(4, 3, 64, 64), torch.randint(0, 2, (4, 1, 64, 64))
        loss = loss_fn(model(images), masks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
