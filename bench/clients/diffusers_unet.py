"""diffusers: a UNet that predicts noise, by the loop of its unconditional training."""

import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from torch import nn

from client_runs.run import Run

LIBRARY = "diffusers"
LOOP = "UNet2DModel, DDPM noise prediction"


def train(run: Run) -> None:
    model = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 64),
        norm_num_groups=8,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=run.steps)
    model = run.plan(model, (torch.randn(8, 3, 16, 16), torch.randint(0, 1000, (8,))), optimizer=optimizer)
    for _ in range(run.steps):
        images, noise = torch.rand(8, 3, 16, 16) * 2 - 1, torch.randn(8, 3, 16, 16)
        times = torch.randint(0, 1000, (8,))
        noisy = scheduler.add_noise(images, noise, times)
        predicted = model(noisy, times, return_dict=False)[0]
        loss = nn.functional.mse_loss(predicted, noise)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
