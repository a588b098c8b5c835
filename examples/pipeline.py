"""Pipeline: each process has some of the layers, and plans them for the micro-batches that it has in flight.

torchrun --nproc-per-node 2 examples/pipeline.py --budget 90%
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

import lowtide

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--budget", default="90%", help="bytes, a size (8GiB) or a share of the stage's peak")
parser.add_argument("--batch-size", type=int, default=64, help="of a micro-batch")
parser.add_argument("--microbatches", type=int, default=4)
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()
WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # the same data in each process
model = nn.Sequential(*(Block() for _ in range(4)))
stage = PipelineStage(model, rank, ranks, torch.device("cpu"))
schedule = Schedule1F1B(stage, args.microbatches, loss_fn=functional.mse_loss)
optimizer = torch.optim.AdamW(model.parameters())
microbatch, target = (torch.randn(args.batch_size, WIDTH) for _ in range(2))

loss_of = (lambda output: functional.mse_loss(output, target)) if stage.is_last else None
options = {"optimizer": optimizer, "loss": loss_of, "pipeline": schedule}
lowtide.checkpoint(model, microbatch, budget=args.budget, **options)
print(f"rank {rank}: {lowtide.microbatches_in_flight(schedule)[rank]} micro-batches in flight")
rows = args.batch_size * args.microbatches
for step in range(args.steps):
    batch, targets = (torch.randn(rows, WIDTH) for _ in range(2))
    losses: list[torch.Tensor] = []
    of_last = {"target": targets, "losses": losses} if stage.is_last else {}
    schedule.step(*([batch] if stage.is_first else []), **of_last)
    optimizer.step()
    optimizer.zero_grad()
    loss = torch.stack(losses).mean() if stage.is_last else torch.zeros(())
    dist.broadcast(loss, ranks - 1)
    print(f"rank {rank}, step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
