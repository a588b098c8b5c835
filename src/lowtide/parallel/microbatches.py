"""How many micro-batches each stage of a pipeline has in flight, by the pipeline's schedule.

    1F1B, stage 0 of 2, 4 micro-batches:    F0 F1 B0 F2 B1 F3 B2 B3      at most 2 in flight

Whatever a stage saves for a backward pass is live as often as it has micro-batches in flight.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lowtide.errors import LowtideError
from lowtide.facts.pipeline import StageInPipeline
from lowtide.torch_compat.pipelining import StageAction, actions_of, stage_of


def microbatches_in_flight(schedule: Any) -> dict[int, int]:
    """By stage, the most micro-batches whose forward pass has run and whose backward pass has not.

    Where a schedule splits the backward pass (zero bubble), the gradients of the inputs end it; on the first
    stage, which has none, those of the weights.

    Args:
        schedule: A schedule of `torch.distributed.pipelining`, made on this process.
    """
    return {stage: most_in_flight(actions) for stage, actions in _by_stage(schedule).items()}


def stage_in_pipeline(schedule: Any, model: nn.Module) -> StageInPipeline:
    """The stage of a schedule, on this process, that has `model`."""
    by_stage = _by_stage(schedule)
    stage = stage_of(schedule, model)
    if stage is None:
        raise LowtideError(
            "no stage of this pipeline on this process has this model: give the module that its stage was "
            "made from, PipelineStage(model, ...)"
        )
    actions = by_stage[stage.number]
    in_flight = most_in_flight(actions)
    others = stage.microbatches - in_flight
    return StageInPipeline(
        index=stage.number,
        microbatches=stage.microbatches,
        in_flight=in_flight,
        # schedules of several stages wait for all sends at the end of the step, others for the last one
        sent=max(1, others) if stage.has_others else 1,
        keeps_buffers=stage.keeps_buffers,
        waiting_for_weights=most_waiting_for_weights(actions),
        is_first=stage.is_first,
        is_last=stage.is_last,
    )


def _by_stage(schedule: Any) -> dict[int, list[StageAction]]:
    actions = actions_of(schedule)
    if actions is None:
        raise LowtideError(
            "a pipeline is a schedule of torch.distributed.pipelining that trains, such as Schedule1F1B, not "
            f"a {type(schedule).__name__}"
        )
    found: dict[int, list[StageAction]] = {}
    for rank in actions:
        for action in actions[rank]:
            found.setdefault(action.stage, []).append(action)
    return dict(sorted(found.items()))


def most_in_flight(actions: Sequence[StageAction]) -> int:
    """The most micro-batches in flight at once, by the actions of one stage in their order.

    Counted by number: torch's own order of 1F1B begins with the second micro-batch on the last stage.
    """
    return _most(actions, "F", lambda action: "BI" if action.stage else "BW")


def most_waiting_for_weights(actions: Sequence[StageAction]) -> int:
    """The most micro-batches whose gradients of inputs have been made, and those of weights have not; 0 for
    the first stage, which makes both at once."""
    return _most(actions, "I", lambda _: "W") if any(action.stage for action in actions) else 0


def _most(actions: Sequence[StageAction], begins: str, ends: Callable[[StageAction], str]) -> int:
    now = most = 0
    for action in actions:
        now += (action.kind == begins) - (action.kind in ends(action))
        most = max(most, now)
    return most
