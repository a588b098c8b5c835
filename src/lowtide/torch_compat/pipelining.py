"""The order of a pipeline's work, and its stages, from a schedule of `torch.distributed.pipelining`."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, NamedTuple

from torch import nn

from lowtide.torch_compat.autograd_engine import ProcessPatch


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


class StageHere(NamedTuple):
    """A stage on this process. `has_others`: the schedule is one for several stages of a process.
    `keeps_buffers`: it has a buffer for each gradient that arrives, all along."""

    number: int
    microbatches: int
    is_first: bool
    is_last: bool
    has_others: bool
    keeps_buffers: bool


def stage_of(schedule: Any, model: nn.Module) -> StageHere | None:
    """The stage of this process that has the model; None where there is none."""
    several = getattr(schedule, "_stages", None)
    stages = several or [getattr(schedule, "_stage", None)]
    stage = next((one for one in stages if one is not None and one.submod is model), None)
    if stage is None:
        return None
    return StageHere(
        number=stage.stage_index,
        microbatches=schedule._n_microbatches,
        is_first=stage.is_first,
        is_last=stage.is_last,
        has_others=several is not None,
        keeps_buffers=keeps_buffers(),
    )


def keeps_buffers() -> bool:
    """Whether this torch keeps a buffer for each gradient that arrives; 2.15 allocates and frees it then."""
    return find_spec("torch.distributed.pipelining._recv_buffers") is None


_EVALUATES: ContextVar[bool] = ContextVar("lowtide_pipeline_evaluates", default=False)


@contextmanager
def _evaluating() -> Iterator[None]:
    before = _EVALUATES.set(True)
    try:
        yield
    finally:
        _EVALUATES.reset(before)


def is_evaluating() -> bool:
    """Whether a pipeline runs forward passes alone (`schedule.eval`), with gradients switched on or not."""
    return _EVALUATES.get()


def around_steps(context: Callable[[], AbstractContextManager[None]]) -> list[ProcessPatch]:
    """Run every step of a pipeline of this process inside of a `context()`, as long as an object holds the
    patches. What a stage receives and sends is in no pass of its model."""
    from torch.distributed.pipelining import schedules

    def wrap(original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def step(schedule: Any, *args: Any, **kwargs: Any) -> Any:
            with context(), nullcontext() if schedule._has_backward else _evaluating():
                return original(schedule, *args, **kwargs)

        return step

    kinds = schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti
    return [ProcessPatch(kind, "step", wrap) for kind in kinds]
