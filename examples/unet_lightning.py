"""A U-Net for segmentation with Lightning.

python examples/unet_lightning.py --budget 90% --batch-size 4 --size 64
"""

import argparse

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lowtide.integrations.lightning import Lowtide

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--budget", default="90%", help="bytes, a size (8GiB) or a share of the peak")
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--size", type=int, default=64, help="of the images, in pixels")
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(L.LightningModule):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.deep = block(3, channels), block(channels, 2 * channels)
        self.up, self.head = block(3 * channels, channels), nn.Conv2d(channels, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.down(x)
        deep = F.interpolate(self.deep(F.max_pool2d(wide, 2)), scale_factor=2.0)
        return self.head(self.up(torch.cat([wide, deep], dim=1)))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


L.seed_everything(0, verbose=False)
images = torch.randn(8 * args.batch_size, 3, args.size, args.size)
data = DataLoader(TensorDataset(images, (images[:, 0] > 0).long()), batch_size=args.batch_size, shuffle=True)
trainer = L.Trainer(
    max_steps=args.steps,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    callbacks=[Lowtide(budget=args.budget)],
)
trainer.fit(UNet(channels=8), data)
print(f"loss {trainer.callback_metrics['loss']:.4f}")
