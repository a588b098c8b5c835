"""The job of each of two processes that train one model with offload."""

import copy

import torch
import torch.distributed as dist
from offload_plans import offload_plan
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from training import Results, differences, train

import lowtide
from lowtide.runtime.runner import runner_of
from lowtide.zoo.targets import Target

ROWS, WIDTH = 256, 64


def trained(rank: int, folder: str) -> tuple[list[str], int, int]:
    """Differences from eager, the number of offloaded values, and the bytes of the store."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2))]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))
    other = copy.deepcopy(model)
    torch.manual_seed(1 + rank)
    batch = torch.randn(ROWS, WIDTH)
    expected = _results(model, batch)
    if rank == 0:
        found = lowtide.profile(
            other,
            batch,
            optimizer=torch.optim.SGD(other.parameters(), 0.1),
            loss=_loss,
            offload=f"disk:{folder}",
        )
        offload_plan(found, delay=1, ahead=2).save(f"{folder}/plan.json")
    dist.barrier()
    lowtide.load_plan(f"{folder}/plan.json").apply(other)
    seen = _results(other, batch)
    backend = runner_of(other).backend
    return differences(expected, seen), len(backend.graphs[-1][1].releases), backend.store.file_bytes


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def _results(model: nn.Module, batch: torch.Tensor) -> Results:
    wrapped = DDP(model, bucket_cap_mb=0.02)
    return train(Target("ranks", wrapped, batch, torch.optim.SGD(model.parameters(), 0.1), _loss), steps=3)
