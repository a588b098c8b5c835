"""What sending gradients to other processes takes, and how a step counts it."""

import logging
from dataclasses import replace

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowtide.distributed.ranks import Ranks
from lowtide.facts import Step
from lowtide.facts.units import format_size
from lowtide.planning.schedules import with_buckets
from lowtide.torchside import ddp, hooks

logger = logging.getLogger("lowtide")

TOLD = "{size} are counted for buckets of gradients, as DistributedDataParallel has them{why}"


def counting_buckets(step: Step, model: nn.Module, ranks: Ranks | None) -> Step:
    """The same step with the buckets of a model that is wrapped in DistributedDataParallel, or that is one of
    several replicas and so will be."""
    buckets, why = ddp.Buckets(), ""
    if isinstance(model, DistributedDataParallel):
        buckets = ddp.buckets_of(model)
    elif ranks is not None and not any(hooks.is_wrapper(parameter) for parameter in model.parameters()):
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
