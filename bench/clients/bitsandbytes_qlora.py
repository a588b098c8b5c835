"""bitsandbytes: linear layers in four bits below trained adapters."""

import bitsandbytes
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from client_runs.run import Run

LIBRARY = "bitsandbytes"
LOOP = "QLoRA: 4-bit linear layers with adapters"


class Regressor(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.up = bitsandbytes.nn.Linear4bit(width, 4 * width, compute_dtype=torch.float32, quant_type="nf4")
        self.down = bitsandbytes.nn.Linear4bit(
            4 * width, width, compute_dtype=torch.float32, quant_type="nf4"
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            values = values + self.down(nn.functional.gelu(self.up(values)))
        return values


def train(run: Run) -> None:
    base = Regressor().to("cpu")  # which quantizes
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["up", "down"]))
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    values = torch.randn(256, 128)
    model = run.plan(model, values, optimizer=optimizer, loss=lambda output: output.square().mean())
    for _ in range(run.steps):
        loss = model(values).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
