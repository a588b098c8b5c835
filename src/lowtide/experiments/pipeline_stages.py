"""A model cut into the stages of a 1F1B pipeline, and the profile of each, in one process.

    blocks 0 1 2 3 4 5, three stages      [0 1] [2 3] [4 5]      what comes before and after goes to the ends

torch cuts the model (`torch.distributed.pipelining.pipeline`, by `torch.export`) before the first block of
each stage but the first. Each stage is profiled on what the stages before it return for one micro-batch.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline

from lowtide import api
from lowtide.errors import CaptureError, LowtideError
from lowtide.facts.pipeline import StageInPipeline
from lowtide.optim.joined_optimizers import join_optimizers
from lowtide.profiles import Profile
from lowtide.torch_compat.pipelining import keeps_buffers
from lowtide.trace.model_call import split_batch
from lowtide.zoo.targets import Target


@dataclass(frozen=True, slots=True)
class ProfiledStage:
    """One stage: the names of its first and its last block, and the micro-batches in flight."""

    first: str
    last: str
    in_flight: int
    profile: Profile


def profile_stages(
    target: Target,
    *,
    stages: int,
    microbatches: int,
    optimizer: Callable[[nn.Module], Any],
    progress: Callable[[int, int], None] = lambda done, total: None,
    **options: Any,
) -> Iterator[ProfiledStage]:
    """The stages of a target whose batch is one micro-batch. `optimizer` makes that of a stage; `options` are
    those of `profile`."""
    blocks = equal_blocks(target.model, at_least=stages)
    starts = [len(blocks) * stage // stages for stage in range(stages)]
    args, kwargs = split_batch(target.batch)
    pipe = _cut(target.model, args, kwargs, [blocks[start] for start in starts[1:]])
    modules = [pipe.get_stage_module(stage) for stage in range(stages)]
    batches = _received(pipe, modules, args, kwargs)
    for stage, (module, batch) in enumerate(zip(modules, batches, strict=True)):
        progress(stage, stages)
        place = StageInPipeline(
            index=stage,
            microbatches=microbatches,
            in_flight=min(microbatches, stages - stage),
            sent=1,
            waiting_for_weights=0,
            keeps_buffers=keeps_buffers(),
            is_first=stage == 0,
            is_last=stage == stages - 1,
        )
        found = api.profile(
            module,
            batch,
            optimizer=join_optimizers(optimizer(module)),
            loss=target.loss if place.is_last else None,
            pipeline=place,
            **options,
        )
        end = starts[stage + 1] if stage + 1 < stages else len(blocks)
        yield ProfiledStage(blocks[starts[stage]], blocks[end - 1], place.in_flight, found)
    progress(stages, stages)


def equal_blocks(model: nn.Module, *, at_least: int) -> list[str]:
    """The names of the blocks of a model: of its longest list of modules of one class."""
    lists = [
        [f"{name}.{child}".lstrip(".") for child, _ in module.named_children()]
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len({type(child) for child in module.children()}) == 1
    ]
    longest = max(lists, key=len, default=[])
    if len(longest) < at_least:
        raise LowtideError(
            f"{type(model).__name__} cannot be cut into {at_least} stages: its longest list of equal blocks "
            f"has {len(longest)}. Give fewer stages, or profile stages of your own with pipeline="
        )
    return longest


def _cut(model: nn.Module, args: Any, kwargs: Any, borders: list[str]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch.export
            return pipeline(model, args, kwargs, split_spec=dict.fromkeys(borders, SplitPoint.BEGINNING))
    except Exception as error:
        first = next(iter(str(error).splitlines()), "no reason given")
        raise CaptureError(
            f"torch cannot cut {type(model).__name__} into stages ({type(error).__name__}: {first[:200]}): "
            "make the stages by hand, and profile each with pipeline="
        ) from error


def _received(pipe: Any, modules: list[nn.Module], args: Any, kwargs: Any) -> list[Any]:
    """What each stage is called with, from one forward pass."""
    seen: dict[int, Any] = {}
    handles = [
        module.register_forward_pre_hook(lambda _module, given, stage=stage: seen.__setitem__(stage, given))
        for stage, module in enumerate(modules)
    ]
    try:
        with torch.no_grad():
            pipe(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return [seen[stage] for stage in range(len(modules))]
