"""rtdl: the FT-Transformer for tables with numbers and categories."""

import torch
from rtdl_revisiting_models import FTTransformer
from torch import nn

from client_runs.run import Run

LIBRARY = "rtdl_revisiting_models"
LOOP = "FT-Transformer for tables"


def train(run: Run) -> None:
    model = FTTransformer(
        n_cont_features=8, cat_cardinalities=[4, 7], d_out=1, **FTTransformer.get_default_kwargs(n_blocks=1)
    )
    optimizer = model.make_default_optimizer()
    model = run.plan(model, (torch.randn(64, 8), torch.randint(0, 4, (64, 2))), optimizer=optimizer)
    for _ in range(run.steps):
        numbers, kinds, targets = torch.randn(64, 8), torch.randint(0, 4, (64, 2)), torch.randn(64)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(numbers, kinds).squeeze(-1), targets)
        loss.backward()
        optimizer.step()
