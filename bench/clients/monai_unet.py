"""monai: a UNet that segments volumes, by its Dice loss."""

import torch
from monai.losses import DiceCELoss
from monai.networks.nets import UNet

from client_runs.run import Run

LIBRARY = "monai"
LOOP = "3D UNet, Dice loss"


def train(run: Run) -> None:
    model = UNet(
        spatial_dims=3,
        in_channels=1,
        out_channels=2,
        channels=(8, 16, 32),
        strides=(2, 2),
        num_res_units=2,
        norm="batch",
    )
    loss_function = DiceCELoss(to_onehot_y=True, softmax=True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    model = run.plan(model, torch.randn(2, 1, 24, 24, 24), optimizer=optimizer)
    model.train()
    for _ in range(run.steps):
        inputs, labels = torch.randn(2, 1, 24, 24, 24), torch.randint(0, 2, (2, 1, 24, 24, 24))
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = loss_function(outputs, labels)
        loss.backward()
        optimizer.step()
