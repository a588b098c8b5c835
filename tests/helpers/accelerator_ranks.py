"""What the ranks of a group run in the tests of accelerators, each on a device of its own."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP

import lowtide

WIDTH, ROWS = 128, 512


@dataclass(frozen=True)
class Compared:
    """A planned training beside an eager one: results that differ, bytes of the peak, and races."""

    different: list[str]
    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int
    recompute_seconds: float
    races: list[str]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.drop(functional.gelu(self.linear(self.norm(value))))


class Branch(Residual):
    """Without the residual, which the model adds outside of the unit."""

    def forward(self, value: Tensor) -> Tensor:
        return self.drop(functional.gelu(self.linear(self.norm(value))))


class Stack(nn.Module):
    def __init__(self, block: type[nn.Module] = Residual) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.adds = block is Branch

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = value + block(value) if self.adds else block(value)
        return value.square().mean()


def ddp(rank: int, folder: str) -> Compared:
    """The plan is made on rank 0, and loaded by all."""

    def plan(model: nn.Module, batch: Tensor, optimizer: torch.optim.Optimizer) -> lowtide.Plan:
        if rank == 0:
            _planned(model, batch, optimizer).save(f"{folder}/plan.json")
        torch.distributed.barrier()
        return lowtide.load_plan(f"{folder}/plan.json")

    return _compared(rank, partial(DDP, device_ids=[rank]), plan)


def fsdp2(rank: int, folder: str) -> Compared:
    """All ranks make a plan together."""
    return _compared(rank, _sharded, _planned)


def fsdp2_with_residuals_outside(rank: int, folder: str) -> Compared:
    return _compared(rank, _sharded, _planned, block=Branch)


def _planned(model: nn.Module, batch: Tensor, optimizer: torch.optim.Optimizer) -> lowtide.Plan:
    return lowtide.profile(model, batch, optimizer=optimizer).plan("70%")


def _sharded(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def _compared(
    rank: int,
    wrap: Callable[[nn.Module], nn.Module],
    plan_of: Callable[..., lowtide.Plan],
    block: type[nn.Module] = Residual,
) -> Compared:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    torch.accelerator.set_device_index(rank)
    device = torch.device(accelerator.type, rank)
    torch.manual_seed(rank)
    batch = torch.randn(ROWS, WIDTH, device=device)
    expected = _trained(*_built(wrap, device, block), batch)
    gc.collect()
    strangers = torch.accelerator.memory_allocated(device) - batch.nbytes
    model, optimizer = _built(wrap, device, block)
    plan = plan_of(model, batch, optimizer)
    plan.apply(model)
    gc.collect()
    torch.accelerator.reset_peak_memory_stats(device)
    seen = _trained(model, optimizer, batch)
    return Compared(
        different=[name for name in expected if not torch.equal(expected[name], seen[name])],
        budget_bytes=plan.budget_bytes,
        predicted_bytes=plan.peak_bytes,
        measured_bytes=torch.accelerator.max_memory_allocated(device) - strangers,
        recompute_seconds=plan.recompute_seconds,
        races=torch.standin.take_races() if hasattr(torch, "standin") else [],
    )


def _built(
    wrap: Callable[[nn.Module], nn.Module], device: torch.device, block: type[nn.Module]
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = wrap(Stack(block).to(device))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> dict[str, Tensor]:
    """Losses, gradients and parameters of three steps, on the host."""
    torch.manual_seed(7)
    results: dict[str, Tensor] = {}
    for step in range(3):
        loss = model(batch)
        loss.backward()
        results[f"loss {step}"] = loss.detach().cpu()
        del loss
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            results[f"gradient of {name} {step}"] = _local(parameter.grad).cpu()
        optimizer.step()
        optimizer.zero_grad()
        results |= {f"{name} {step}": _local(p).detach().cpu() for name, p in model.named_parameters()}
    return results


def _local(value: Tensor) -> Tensor:
    return getattr(value, "_local_tensor", value)
