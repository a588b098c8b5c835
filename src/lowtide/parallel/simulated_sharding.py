"""How FSDP2 would shard a model over many processes, without these processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import nn

from lowtide.errors import LowtideError
from lowtide.facts.sharding import Part, Sharding, Unit
from lowtide.ops.device_memory import CPU, common_device
from lowtide.optim.shadow_optimizer import shadow_of
from lowtide.torch_compat import fsdp2
from lowtide.torch_compat.dispatch import FakeTensorMode
from lowtide.torch_compat.dtensor import is_divided

SHARDS = ("fsdp2",)


@dataclass(frozen=True, slots=True)
class SimulatedSharding:
    """The units of a model, the model itself first, and how FSDP2 would shard them.

    `stored_dtype` is the dtype of the shards, where it differs from the dtype of the computation.
    """

    units: tuple[nn.Module, ...]
    sharding: Sharding
    stored_dtype: torch.dtype | None = None


def simulate_sharding(
    model: nn.Module,
    *,
    ranks: int,
    shard: str = "fsdp2",
    blocks: Sequence[nn.Module] | None = None,
    stored_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> SimulatedSharding:
    """The sharding of `fully_shard` on every block, and then on the model, on `ranks` processes.

    `blocks` default to `blocks_of(model)`. For a `MixedPrecisionPolicy`, give the model in its `param_dtype`;
    shards are stored in `stored_dtype`, and gradients are reduced in `reduce_dtype`. `backend` defaults to
    gloo on the CPU, which copies all bytes that it exchanges, and to nccl elsewhere, which copies none.
    """
    if shard not in SHARDS:
        raise LowtideError(f"there is no way to shard called '{shard}': choose one of {', '.join(SHARDS)}")
    if ranks < 1:
        raise LowtideError(f"a model cannot be divided among {ranks} processes: give at least 1")
    if is_divided(model):
        raise LowtideError("the model is sharded already: leave `ranks` and `shard` out")
    units = (model, *(blocks_of(model) if blocks is None else blocks))
    on_cpu = common_device(model.parameters()) == CPU
    copies = fsdp2.copies_inside(backend or ("gloo" if on_cpu else "nccl"))
    return SimulatedSharding(
        units,
        Sharding(
            ranks=ranks,
            units=_units(model, units, ranks, stored_dtype, reduce_dtype),
            gather_copies=copies.gather,
            reduce_copies=copies.reduce,
        ),
        stored_dtype,
    )


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The outermost modules with siblings of the same class in a list, a dict or a sequence."""
    found: list[nn.Module] = []
    waiting = [model]
    while waiting:
        module = waiting.pop(0)
        children = list(module.children())
        alike: list[nn.Module] = []
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            classes = [type(child) for child in children]
            alike = [c for c in children if classes.count(type(c)) > 1 and _is_block(c)]
        found += alike
        waiting += [child for child in children if child not in alike]
    return found


def _is_block(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _units(
    model: nn.Module,
    units: Sequence[nn.Module],
    ranks: int,
    stored_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
) -> tuple[Unit, ...]:
    names = {id(module): name for name, module in model.named_modules()}
    owner: dict[str, int] = {}
    for number, unit in enumerate(units):
        prefix = f"{names[id(unit)]}." if number else ""
        owner.update({name: number for name, _ in model.named_parameters() if name.startswith(prefix)})
    parts: list[list[Part]] = [[] for _ in units]
    for name, parameter in model.named_parameters():
        parts[owner[name]].append(_part(name, parameter, ranks, stored_dtype, reduce_dtype))
    return tuple(
        Unit(name=names[id(unit)], parts=tuple(own), ranks=ranks, frees_after_forward=number > 0, root=0)
        for number, (unit, own) in enumerate(zip(units, parts, strict=True))
    )


def _shard_shape(parameter: torch.Tensor, ranks: int) -> tuple[int, ...]:
    if not parameter.dim():
        raise LowtideError("FSDP2 cannot divide a parameter without dimensions: give it the shape (1,)")
    return (ceil(parameter.shape[0] / ranks), *parameter.shape[1:])


def _part(
    name: str,
    parameter: torch.Tensor,
    ranks: int,
    stored_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
) -> Part:
    computes = parameter.dtype
    stored = _stored(parameter, stored_dtype)
    reduces = reduce_dtype or computes
    numel = torch.Size(_shard_shape(parameter, ranks)).numel()
    return Part(
        name=name,
        shard_bytes=numel * stored.itemsize,
        whole_bytes=numel * ranks * computes.itemsize,
        cast_bytes=numel * computes.itemsize if stored != computes else 0,
        reduced_bytes=numel * ranks * reduces.itemsize,
        gradient_bytes=numel * stored.itemsize,
    )


def _stored(parameter: torch.Tensor, stored_dtype: torch.dtype | None) -> torch.dtype:
    return stored_dtype if stored_dtype and parameter.is_floating_point() else parameter.dtype


def simulated_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    tables: Sequence[dict[int, int]],
    *,
    simulated: SimulatedSharding,
) -> torch.optim.Optimizer:
    """The optimizer over one process's shards of the parameters, which are fake tensors.

    `tables` are keyed by `id(parameter)`; each shard gets the entry of its parameter.
    """
    mode = FakeTensorMode()
    shards: dict[int, torch.Tensor] = {}
    for parameter in model.parameters():
        with mode:
            shard = torch.empty(
                _shard_shape(parameter, simulated.sharding.ranks),
                dtype=_stored(parameter, simulated.stored_dtype),
                device=parameter.device,
            )
        shards[id(parameter)] = shard.requires_grad_(parameter.requires_grad)
    for known in tables:
        known.update({id(shard): known[key] for key, shard in shards.items() if key in known})
    return shadow_of(optimizer, shards, mode)
