"""Tensor parallelism: each process has a part of every layer's columns or rows, and plans its activations.

torchrun --nproc-per-node 2 examples/tensor_parallel.py --budget 70%
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import lowtide

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--budget", default="70%", help="bytes, a size (8GiB) or a share of the peak")
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


dist.init_process_group("gloo")
torch.manual_seed(0)  # the same model and data in each process
model = nn.Sequential(*(Block(args.width) for _ in range(4)))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for block in model:
    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.randn(args.batch_size, args.width)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


lowtide.checkpoint(model, batch, budget=args.budget, optimizer=optimizer, loss=loss_of)

for step in range(args.steps):
    loss = loss_of(model(torch.randn(args.batch_size, args.width)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {dist.get_rank()}, step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
