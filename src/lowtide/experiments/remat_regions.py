"""Blocks recomputed by the package torch_remat, for comparison: named regions, and no budget.

torch_remat replays a block as torch.utils.checkpoint does, and leaves torch's generators to its user. So a
block's dropout needs a hook that restores their states at replay, and sets them back after it.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

Forward = Callable[..., Any]
States = list[Tensor]


class ReplayedGenerators:
    """A `RecomputeStateHook` of torch_remat: torch's generators as they were when the block ran first.

    `before` has their states at the start of a replay.
    """

    def __init__(self) -> None:
        self.before: States = []

    def snapshot(self) -> States:
        if not torch.accelerator.is_available():
            return [torch.get_rng_state()]
        return [torch.get_rng_state(), *torch.get_device_module().get_rng_state_all()]

    def restore(self, states: States) -> None:
        self.before = self.snapshot()
        _set(states)


def region(forward: Forward) -> Forward:
    """`forward` as one region that is recomputed in backward."""
    torch_remat: Any = import_module("torch_remat")
    generators = ReplayedGenerators()

    def body(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        if torch_remat.is_recomputing():
            _set(generators.before)
        return result

    checkpointed: Forward = torch_remat.checkpoint(recompute_state_hooks=(generators,))(body)
    return checkpointed


def _set(states: States) -> None:
    torch.set_rng_state(states[0])
    if states[1:]:
        torch.get_device_module().set_rng_state_all(states[1:])
