"""The processes that train one model together: who they are, and how they work and fail together.

They talk through the store of their process group, whatever its backend, so that whoever waits for a rank
can tell which one it is.

What sending gradients to other processes takes, and how a step counts it.
"""

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowtide.errors import LowtideError, RankError
from lowtide.facts import Step
from lowtide.planning.schedules import with_buckets
from lowtide.torch_compat import ddp, dispatch, fsdp2
from lowtide.units import format_size

T = TypeVar("T")

_rounds: Counter[str] = Counter()
"""How often the ranks of a group, by its name, have met so far: the same number in each of them."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes of a group, as one of them sees it; `divided` where each holds a part of the model."""

    group: dist.ProcessGroup
    rank: int
    size: int
    divided: bool = False


def ranks_of(model: nn.Module, group: dist.ProcessGroup | None) -> Ranks | None:
    """Who trains `model`: the processes of `group`, else of `group_for(model)`; None for a process alone."""
    if not dist.is_available() or not dist.is_initialized():
        _check_alone()
        return None
    group = group or group_for(model)
    size = dist.get_world_size(group)
    divided = isinstance(model, nn.Module) and bool(fsdp2.units_of(model))
    return Ranks(group, dist.get_rank(group), size, divided) if size > 1 else None


def group_for(model: nn.Module) -> dist.ProcessGroup:
    """The processes of a model's DistributedDataParallel, or those that it is divided among, else all."""
    divided = fsdp2.group_of(model) if isinstance(model, nn.Module) else None
    return divided or ddp.default_group(model)


def _check_alone() -> None:
    size = os.environ.get("WORLD_SIZE", "")
    if "RANK" in os.environ and size.isdigit() and int(size) > 1:
        raise LowtideError(
            f"this is one of {size} processes (WORLD_SIZE), but there is no process group: call "
            "torch.distributed.init_process_group() before planning, or unset WORLD_SIZE where each "
            "process trains alone"
        )


def together(ranks: Ranks, work: Callable[[], T], *, tell: Callable[[T], Any]) -> tuple[T, list[Any]]:
    """Do `work` on every rank; its result here, and what each rank tells of its own (plain data).

    Where it fails on one rank, that raises its own error and all others a `RankError`. So does a rank that
    does not come within the group's time-out.
    """
    name = ddp.name_of(ranks.group)
    _rounds[name] += 1
    place = f"lowtide/{_rounds[name]}"
    store = ddp.store_of(ranks.group)
    try:
        result = work()
        record = {"told": tell(result)}
    except BaseException as error:
        store.set(f"{place}/{ranks.rank}", json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise
    store.set(f"{place}/{ranks.rank}", json.dumps(record))
    told = _told(ranks, store, place)
    if store.add(f"{place}/read", 1) == ranks.size:
        for rank in range(ranks.size):
            store.delete_key(f"{place}/{rank}")
        store.delete_key(f"{place}/read")
    return result, told


def _told(ranks: Ranks, store: Any, place: str) -> list[Any]:
    timeout = ddp.timeout_of(ranks.group)
    deadline = time.monotonic() + timeout.total_seconds()
    told = []
    for rank in range(ranks.size):
        left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            store.wait([f"{place}/{rank}"], left)
        except RuntimeError as error:  # of several kinds, by the kind of store
            raise RankError(
                rank,
                f"rank {rank} did not come to agree on a plan within {timeout.total_seconds():.0f} s: look "
                "at its own output for why. Every rank has to call lowtide; a longer wait is "
                "init_process_group(timeout=...)",
            ) from error
        record = json.loads(store.get(f"{place}/{rank}"))
        if "error" in record:
            raise RankError(
                rank,
                f"rank {rank} cannot train with the others: {record['error']}",
                kind=record["error"].partition(":")[0],
            )
        told.append(record["told"])
    return told


logger = logging.getLogger("lowtide")

TOLD = "{size} are counted for buckets of gradients, as DistributedDataParallel has them{why}"


def counting_buckets(step: Step, model: nn.Module, ranks: Ranks | None) -> Step:
    """The same step with the buckets of a model that is wrapped in DistributedDataParallel, or that is one of
    several replicas and so will be."""
    buckets, why = ddp.Buckets(), ""
    if isinstance(model, DistributedDataParallel):
        buckets = ddp.buckets_of(model)
    elif ranks is not None and not any(dispatch.is_wrapper(parameter) for parameter in model.parameters()):
        buckets = ddp.future_buckets(model)
        why = (
            f": this is one of {ranks.size} processes. Plan the wrapped model to have its options counted, "
            "or pass a process_group of this process alone where nothing is sent"
        )
    if not buckets.nbytes:
        return step
    note = TOLD.format(size=format_size(buckets.nbytes), why=why)
    logger.info(note)
    counted = with_buckets(step, bucket_bytes=buckets.nbytes, gradients_in_buckets=buckets.hold_gradients)
    return replace(counted, notes=(*counted.notes, note))
