"""FSDP2 on several processes: parameters, gradients and optimizer state are sharded, activations planned.

torchrun --nproc-per-node 2 examples/fsdp2.py --budget 70%
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import lowtide

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--budget", default="70%", help="bytes, a size (8GiB) or a share of the peak")
parser.add_argument("--batch-size", type=int, default=256, help="of each process")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()


class Network(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        parts = (nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
        self.blocks, self.head = nn.ModuleList(parts), nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


dist.init_process_group("gloo")
torch.manual_seed(0)  # the same parameters everywhere
model = Network(args.width)
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())

torch.manual_seed(dist.get_rank())  # other data in each process
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
