"""The order of a pipeline's work, and its stages, from a schedule of `torch.distributed.pipelining`."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

from lowtide.facts.pipeline import StageInPipeline


class StageAction(NamedTuple):
    """One action of a `stage` on a micro-batch; `kind` is `F` (forward), `B` (backward), `I` (gradients of
    inputs) or `W` (gradients of weights)."""

    stage: int
    kind: str


def actions_of(schedule: Any) -> dict[int, list[StageAction]] | None:
    """By rank, the forward and backward actions of a schedule in their order; None for any other object, and
    for a schedule without a backward pass."""
    order = getattr(schedule, "pipeline_order", None)
    if not isinstance(order, dict) or not order:
        return None
    return {rank: list(_flat(actions)) for rank, actions in sorted(order.items())}


def _flat(actions: Iterable[Any]) -> Iterator[StageAction]:
    """Without bubbles and communication; actions that overlap count one after the other."""
    for action in actions:
        if action is None:
            continue
        if action.sub_actions:
            yield from _flat(action.sub_actions)
        elif action.computation_type.value in ("F", "B", "I", "W"):
            yield StageAction(action.stage_index, action.computation_type.value)


def stage_of(schedule: Any, model: nn.Module, in_flight: dict[int, int]) -> StageInPipeline | None:
    """The stage of this process that has the model; None where there is none."""
    several = getattr(schedule, "_stages", None)
    stages = several or [getattr(schedule, "_stage", None)]
    stage = next((one for one in stages if one is not None and one.submod is model), None)
    if stage is None:
        return None
    index, microbatches = stage.stage_index, schedule._n_microbatches
    others = microbatches - in_flight[index]
    return StageInPipeline(
        index=index,
        microbatches=microbatches,
        in_flight=in_flight[index],
        # schedules of several stages wait for all sends at the end of the step, 1F1B for the first ones
        sent=others if several else min(1, others),
        is_first=stage.is_first,
        is_last=stage.is_last,
    )
