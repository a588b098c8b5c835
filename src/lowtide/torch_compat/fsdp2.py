"""FSDP2: which modules are units, what their parameters are, and how to call one without other processes."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule

from lowtide.facts.sharding import Part, Sharding, Unit

WAIT = torch.ops._c10d_functional.wait_tensor.default
"""The op that waits until the result of a collective is there."""


class Copies(NamedTuple):
    """The number of copies of the exchanged bytes that a communication library keeps live."""

    gather: int
    reduce: int


def copies_inside(backend: str) -> Copies:
    return Copies(1, 1) if backend == "gloo" else Copies(0, 0)


def copies_in_group(name: str) -> Copies:
    """The copies that the library of a process group keeps, by the group's name."""
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return copies_inside(resolve(name).name())


def units_of(model: nn.Module) -> list[nn.Module]:
    """The modules that `fully_shard` was called on, the outermost first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def gathered(model: nn.Module) -> dict[str, tuple[torch.Tensor, nn.Parameter]]:
    """The gathered tensors of parameters, as far as they exist by now, each with the user's own parameter, by
    the parameter's name."""
    return {
        name: (part._unsharded_param, part.sharded_param)
        for name, part in _named_parts(model)
        if hasattr(part, "_unsharded_param")
    }


def sharded_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The user's own parameters of all units, gathered by now or not."""
    return [part.sharded_param for _, part in _named_parts(model)]


def reset(model: nn.Module) -> None:
    """Free all gathered parameters after a call that ended early, or without a backward pass."""
    for unit in units_of(model):
        if unit._get_fsdp_state()._is_root:  # type: ignore[operator]
            unit.reset_iter_state()  # type: ignore[operator]


class _Alone:
    """Replaces an all-gather: the shards of other processes stay uninitialized."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, **_: Any) -> None:
        return None


@contextlib.contextmanager
def called_once(model: nn.Module, *, alone: bool) -> Iterator[None]:
    """Call the model without a backward pass; `alone`, without the other processes too.

    Afterwards the same parameters are gathered as before, so that the processes stay in step.
    """
    groups = [group for unit in units_of(model) for group in _groups(unit)]
    called = [group.comm_ctx for group in groups if hasattr(group.comm_ctx, "post_forward_order")]
    orders = [(exchange, list(exchange.post_forward_order)) for exchange in called]
    places = [(group, list(group._post_forward_indices)) for group in groups]
    whole = [group for group in groups if group.is_unsharded]
    for group in whole:
        group._to_sharded = group._to_sharded_post_forward = _stay
    try:
        with _alone(model) if alone else contextlib.nullcontext():
            yield
    finally:
        reset(model)
        for group in whole:
            del group._to_sharded, group._to_sharded_post_forward
        for exchange, order in orders:
            exchange.post_forward_order[:] = order
        for group, indices in places:
            group._post_forward_indices[:] = indices


def _stay() -> None:
    return None


@contextlib.contextmanager
def _alone(model: nn.Module) -> Iterator[None]:
    """Call the model without the other processes: gathered parameters have the right layout, not values."""
    groups = [group for unit in units_of(model) for group in _groups(unit)]
    before = [group._all_gather_comm for group in groups]
    for group in groups:
        group._all_gather_comm = _Alone()
    try:
        yield
    finally:
        for group, comm in zip(groups, before, strict=True):
            group._all_gather_comm = comm


def sharding_of(model: nn.Module) -> Sharding | None:
    """How a model is sharded, after its first call; None for an unsharded model."""
    units = units_of(model)
    groups = [group for unit in units for group in _groups(unit)]
    if not groups:
        return None
    index = {id(unit._get_fsdp_state()): place for place, unit in enumerate(units)}  # type: ignore[operator]
    names = {id(module): name for name, module in model.named_modules()}
    backends = {group._all_gather_process_group.name() for group in groups}
    copies = copies_inside("gloo" if "gloo" in backends else "")
    root = 0
    found = []
    for place, unit in enumerate(units):
        state: Any = unit._get_fsdp_state()  # type: ignore[operator]
        root = place if state._is_root else root
        ahead = [index[id(other)] for other in state._states_to_forward_prefetch]
        behind = [index[id(other)] for other in state._states_to_backward_prefetch]
        found.append(
            Unit(
                name=names[id(unit)],
                parts=tuple(
                    _part(part, name) for name, part in _named_parts(model) if part in _parts_of(unit)
                ),
                ranks=max((_num_shards(group) for group in _groups(unit)), default=1),
                between_ranks=max((_num_between(group) for group in _groups(unit)), default=0),
                frees_after_forward=all(group._reshard_after_forward for group in _groups(unit)),
                root=root,
                prefetches_forward=tuple(ahead),
                prefetches_backward=tuple(behind) or None,
            )
        )
    return Sharding(
        ranks=groups[0]._all_gather_process_group.size(),
        units=tuple(found),
        gather_copies=copies.gather,
        reduce_copies=copies.reduce,
        kept_reductions=groups[0].comm_ctx.reduce_scatter_max_input_buffers,
    )


def _num_shards(group: Any) -> int:
    """The number of processes that the parameters of a group are divided among: of one replica, where there
    are several."""
    return int(group._all_gather_process_group.size())


def _num_between(group: Any) -> int:
    """The number of processes that they are divided among between forward and backward, where it is another
    (`reshard_after_forward=N`); else 0."""
    return int(group.post_forward_mesh_info.shard_mesh_size) if group._use_post_forward_mesh else 0


def _groups(unit: nn.Module) -> list[Any]:
    state: Any = unit._get_fsdp_state()  # type: ignore[operator]
    return list(state._fsdp_param_groups)


def _parts_of(unit: nn.Module) -> list[Any]:
    return [part for group in _groups(unit) for part in group.fsdp_params]


def _named_parts(model: nn.Module) -> list[tuple[str, Any]]:
    """FSDP2's own record of every parameter, with the name that it has in the model."""
    names = {id(module): name for name, module in model.named_modules()}
    named = []
    for unit in units_of(model):
        for part in _parts_of(unit):
            info = part._module_info
            prefix = names[id(info.module)]
            named.append((f"{prefix}.{info.param_name}" if prefix else info.param_name, part))
    return named


def _part(part: Any, name: str) -> Part:
    ranks = part.mesh_info.shard_mesh_size
    numel = part.padded_sharded_param_size.numel()
    stored = part.orig_dtype
    computes = part.param_dtype or stored
    reduces = part.reduce_dtype or computes
    return Part(
        name=name,
        shard_bytes=numel * stored.itemsize,
        whole_bytes=numel * ranks * computes.itemsize,
        cast_bytes=numel * computes.itemsize if part.param_dtype else 0,
        reduced_bytes=numel * ranks * reduces.itemsize,
        gradient_bytes=numel * stored.itemsize,
    )
