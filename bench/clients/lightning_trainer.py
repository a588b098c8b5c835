"""Lightning: an autoencoder, as on the first page of its documentation."""

from itertools import pairwise

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from client_runs.run import Run
from lowtide.integrations.lightning import Lowtide

LIBRARY = "lightning"
LOOP = "autoencoder, Trainer"


class AutoEncoder(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        widths = [784, 256, 128, 64, 3]
        pairs = list(pairwise(widths))
        layers = [*pairs, *((wide, narrow) for narrow, wide in reversed(pairs))]
        self.network = nn.Sequential(*(nn.Sequential(nn.Linear(*pair), nn.GELU()) for pair in layers))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (images,) = batch
        loss = nn.functional.mse_loss(self.network(images), images)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def train(run: Run) -> None:
    module = AutoEncoder()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=run.callbacks(Lowtide, module),
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.rand(run.steps * 1024, 784)), batch_size=1024))
