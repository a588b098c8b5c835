"""Private names of DistributedDataParallel and of process groups."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_process_group_name, _get_process_group_store, _world
from torch.nn.parallel import DistributedDataParallel

from lowtide.errors import Unsupported


@dataclass(frozen=True, slots=True)
class Buckets:
    """The buckets into which gradients are copied before the all-reduce.

    `hold_gradients`: `.grad` is a view of a bucket, so that each gradient is freed once it is copied.
    """

    nbytes: int = 0
    hold_gradients: bool = False


def active() -> DistributedDataParallel | None:
    """The wrapper whose forward is running."""
    wrapper: DistributedDataParallel | None = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    return wrapper


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of a wrapper; any other model itself."""
    if not isinstance(model, DistributedDataParallel):
        return model
    inner: nn.Module = model.module
    return inner


def check(model: nn.Module) -> None:
    """Refuse a wrapper under which no plan can run."""
    if isinstance(model, DistributedDataParallel) and model.mixed_precision is not None:
        raise Unsupported(
            "DistributedDataParallel(mixed_precision=...) changes the parameters under a plan: use "
            "torch.autocast instead, or lowtide.remove(model)"
        )


def buckets_of(wrapper: DistributedDataParallel) -> Buckets:
    """The buckets of a wrapper, once it has trained a step.

    In the first step of a static graph, gradients stay live to the end of the backward pass. With
    `batched_grad_copy`, they stay live until their bucket is full. Both count beside the buckets.
    """
    check(wrapper)
    at_once = wrapper.gradient_as_bucket_view and not wrapper.static_graph
    at_once = at_once and not getattr(wrapper, "batched_grad_copy", False)
    nbytes = sum(parameter.nbytes for parameter in wrapper._module_parameters if parameter.requires_grad)
    return Buckets(nbytes, hold_gradients=at_once)


def future_buckets(model: nn.Module) -> Buckets:
    """The buckets of a wrapper that is made later, without options."""
    return Buckets(sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad))


def default_group(model: nn.Module) -> dist.ProcessGroup:
    """The processes that train a model, unless the user names a group."""
    if isinstance(model, DistributedDataParallel):
        return group_of(model)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def group_of(wrapper: DistributedDataParallel) -> dist.ProcessGroup:
    group: Any = wrapper.process_group
    assert isinstance(group, dist.ProcessGroup)
    return group


def store_of(group: dist.ProcessGroup) -> Any:
    """The `torch.distributed.Store` that the processes of a group share."""
    return _get_process_group_store(group)


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether a group still exists."""
    return dist.is_initialized() and group in _world.pg_map


def is_of_communication(error: BaseException) -> bool:
    """Whether an exchange with other processes raised an error. gloo's errors name gloo's source files."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def name_of(group: dist.ProcessGroup) -> str:
    return _get_process_group_name(group)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long the processes of a group wait for each other."""
    timeout: timedelta = store_of(group).timeout
    return timeout
