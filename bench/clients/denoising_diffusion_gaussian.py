"""denoising-diffusion-pytorch: the wrapper that draws times and noise inside and returns the loss."""

import torch
from denoising_diffusion_pytorch import GaussianDiffusion, Unet

from client_runs.run import Run

LIBRARY = "denoising-diffusion-pytorch"
LOOP = "GaussianDiffusion around its Unet"


def train(run: Run) -> None:
    model = GaussianDiffusion(Unet(dim=16, dim_mults=(1, 2), flash_attn=False), image_size=16, timesteps=100)
    optimizer = torch.optim.Adam(model.parameters(), lr=8e-5)
    model = run.plan(model, torch.rand(8, 3, 16, 16), optimizer=optimizer)
    for _ in range(run.steps):
        loss = model(torch.rand(8, 3, 16, 16))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
