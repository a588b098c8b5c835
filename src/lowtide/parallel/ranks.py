"""The processes that train one model, how they agree on one plan, and the bytes of DDP's buckets.

    rank 0: capture ─┐                 ┌─ plan ─┐
    rank 1: capture ─┼─ same model?   ─┤        ├─ all ranks have the plan
    rank 2: capture ─┘                 └────────┘

Of all ranks with equal graphs, the first makes the plan. Ranks talk through the store of their process group,
with any backend. So a waiting rank knows which rank it waits for.
"""

import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowtide.analyze.captured_step import Captured
from lowtide.errors import LowtideError, PlanMismatch, RankError
from lowtide.facts import Step
from lowtide.facts.serial import solution_from_dict, solution_to_dict
from lowtide.planning.schedules import with_buckets
from lowtide.plans import Plan
from lowtide.torch_compat import ddp, dispatch, dtensor
from lowtide.trace.model_call import Loop
from lowtide.units import format_size

T = TypeVar("T")
Identity = Sequence[tuple[str, str]]

BATCH = "batch"
"""The one part of an identity in which ranks may differ."""
BUCKETS_NOTE = "{size} are counted for buckets of gradients, as DistributedDataParallel has them{why}"

logger = logging.getLogger("lowtide")

_rounds: Counter[str] = Counter()
"""By group name, the number of meetings so far, which is equal on all ranks."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes of a group, seen from one of them; `sharded`: each has a shard of the model."""

    group: dist.ProcessGroup
    rank: int
    size: int
    sharded: bool = False


def ranks_of(model: nn.Module, group: dist.ProcessGroup | None) -> Ranks | None:
    """The processes that train `model`: of `group`, else of `group_for(model)`; None for one process."""
    if not dist.is_available() or not dist.is_initialized():
        _check_alone()
        return None
    group = group or group_for(model)
    size = dist.get_world_size(group)
    sharded = isinstance(model, nn.Module) and dtensor.is_divided(model)
    return Ranks(group, dist.get_rank(group), size, sharded) if size > 1 else None


def group_for(model: nn.Module) -> dist.ProcessGroup:
    """The group of a model's DistributedDataParallel or of the one dimension of its mesh, else of all
    processes."""
    found = dtensor.group_of(model) if isinstance(model, nn.Module) else None
    return found or ddp.default_group(model)


def _check_alone() -> None:
    size = os.environ.get("WORLD_SIZE", "")
    if "RANK" in os.environ and size.isdigit() and int(size) > 1:
        raise LowtideError(
            f"this is one of {size} processes (WORLD_SIZE), but there is no process group: call "
            "torch.distributed.init_process_group() before planning, or unset WORLD_SIZE where each "
            "process trains alone"
        )


def plan_together(
    ranks: Ranks,
    *,
    capture: Callable[[], Captured],
    settings: Identity,
    memory: Callable[[], Any],
    make: Callable[[Captured, list[Any]], Plan],
    loop: Callable[[], Loop],
) -> Plan:
    """One plan for all ranks with the same graphs: the first of these ranks calls `make`, with what `memory`
    (plain data) is on each rank.

    All ranks capture, since a model may exchange data with other ranks at capture. A difference in the model
    or in the user's `settings` stops all ranks; batches may differ.
    """
    captured, told = together(
        ranks, capture, tell=lambda c: [[*c.step.identity, *settings], c.step.fingerprint, memory()]
    )
    _check_same([dict(identity) for identity, _, _ in told])
    graphs = [fingerprint for _, fingerprint, _ in told]
    memories = [memory_there for _, _, memory_there in told]
    maker = graphs.index(graphs[ranks.rank])
    made, plans = together(
        ranks,
        lambda: make(captured, memories) if maker == ranks.rank else None,
        tell=lambda plan: None if plan is None else solution_to_dict(plan.solution),
    )
    if maker != ranks.rank:
        made = Plan(solution_from_dict(plans[maker]), loop=loop(), traced=captured.traced)
    assert made is not None
    return made


def check_together(ranks: Ranks, plan: Plan, check: Callable[[], None]) -> None:
    """Stop all ranks where `check` fails on one of them, or where two have different plans for equal graphs.

    Ranks of a sharded model may have different plans, each from the rank's own profile.
    """
    is_own = ranks.sharded and plan.step is not None
    _, told = together(
        ranks, check, tell=lambda _: ["" if is_own else _digest(plan), plan.solution.fingerprint]
    )
    first: dict[str, int] = {}
    for rank, (found, graphs) in enumerate(told):
        if not found:
            continue
        other = first.setdefault(graphs, rank)
        if told[other][0] != found:
            raise PlanMismatch(
                f"rank {rank} has another plan than rank {other} for the same step (hash {found} "
                f"instead of {told[other][0]}): load the same file on every rank, or let "
                "lowtide.checkpoint(), called on all of them, make one plan and send it"
            )


def _digest(plan: Plan) -> str:
    data = json.dumps(solution_to_dict(plan.solution), sort_keys=True)
    return hashlib.sha256(data.encode()).hexdigest()[:16]


def _check_same(identities: Sequence[dict[str, Any]]) -> None:
    for rank, identity in enumerate(identities):
        for what, value in identities[0].items():
            if what != BATCH and identity.get(what) != value:
                raise PlanMismatch(
                    f"rank {rank} has the {what} '{identity.get(what)}', and rank 0 '{value}': all ranks "
                    "train one model. Give them the same, or a process_group of those that do"
                )


def together(ranks: Ranks, work: Callable[[], T], *, tell: Callable[[T], Any]) -> tuple[T, list[Any]]:
    """Do `work` on every rank. Returns this rank's result, and what `tell` gives (plain data) on each rank.

    Where `work` fails on one rank, this rank raises its own error and all others a `RankError`. All ranks
    raise a `RankError` where one rank does not come within the group's time-out.
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


def count_buckets(step: Step, model: nn.Module, ranks: Ranks | None) -> Step:
    """The step with the buckets of DistributedDataParallel, for a wrapped model, or for one of several
    replicas, which will be wrapped."""
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
    note = BUCKETS_NOTE.format(size=format_size(buckets.nbytes), why=why)
    logger.info(note)
    counted = with_buckets(step, bucket_bytes=buckets.nbytes, gradients_in_buckets=buckets.hold_gradients)
    return replace(counted, notes=(*counted.notes, note))
