"""How many micro-batches each stage of a pipeline has in flight, by the pipeline's schedule.

    1F1B, stage 0 of 2, 4 micro-batches:    F0 F1 B0 F2 B1 F3 B2 B3      at most 2 in flight

Whatever a stage saves for a backward pass is live as often as it has micro-batches in flight.
"""

from collections.abc import Iterable
from typing import Any

from lowtide.errors import LowtideError
from lowtide.torch_compat.pipelining import StageAction, actions_of


def microbatches_in_flight(schedule: Any) -> dict[int, int]:
    """By stage, the most micro-batches whose forward pass has run and whose backward pass has not.

    For `calls` of `profile` and `checkpoint`. Where a schedule splits the backward pass into gradients of
    inputs and of weights (zero bubble), a micro-batch is in flight until both have run.

    Args:
        schedule: A schedule of `torch.distributed.pipelining`, made on this process.
    """
    actions = actions_of(schedule)
    if actions is None:
        raise LowtideError(
            f"microbatches_in_flight() needs a schedule of torch.distributed.pipelining that trains, such as "
            f"Schedule1F1B(stage, 8, loss_fn=...), not a {type(schedule).__name__}"
        )
    found: dict[int, int] = {}
    for rank in actions:
        for stage in sorted({action.stage for action in actions[rank]}):
            found[stage] = most_in_flight(action for action in actions[rank] if action.stage == stage)
    return dict(sorted(found.items()))


def most_in_flight(actions: Iterable[StageAction]) -> int:
    """The most micro-batches in flight at once, by the actions of one stage in their order.

    Counted by number: torch's own order of 1F1B begins with the second micro-batch on the last stage.
    """
    flying = most = 0
    for action in actions:
        flying += (action.kind == "F") - (action.kind in ("B", "W"))
        most = max(most, flying)
    return most
