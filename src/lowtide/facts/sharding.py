"""How the parameters of a model are divided among processes (FSDP2).

A unit is a module that `fully_shard` was called on: its parameters are all-gathered before its forward and
its backward pass and resharded after each; its gradients are reduce-scattered when its backward pass ends.
"""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One parameter of a unit. All bytes are padded to the same size on every process.

    `shard_bytes` are stored here. `whole_bytes`: the gathered parameter, in the dtype of the computation.
    `cast_bytes`: the input of the all-gather, where its dtype is not the stored one. `reduced_bytes`: the
    whole gradient, in the dtype of the reduction. `gradient_bytes`: this process's shard of it, in the
    optimizer's dtype.
    """

    name: str
    shard_bytes: int
    whole_bytes: int
    cast_bytes: int
    reduced_bytes: int
    gradient_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A module whose parameters are gathered together.

    `ranks`: the processes that its parameters are divided among. `frees_after_forward`: it reshards after
    forward and gathers again for backward; where `between_ranks` is not 0, it does so among these few
    processes, each of which keeps a larger part in between. `root`: index of the outermost unit around it.
    `prefetches_forward` and `prefetches_backward`: units that the user wants gathered ahead; None is the
    default, the previous unit in backward.
    """

    name: str
    parts: tuple[Part, ...]
    ranks: int
    frees_after_forward: bool
    root: int
    between_ranks: int = 0
    prefetches_forward: tuple[int, ...] = ()
    prefetches_backward: tuple[int, ...] | None = None

    @property
    def whole_bytes(self) -> int:
        return sum(part.whole_bytes for part in self.parts)

    @property
    def cast_bytes(self) -> int:
        return sum(part.cast_bytes for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The units of a model on `ranks` processes, outer units first; `ranks` of the outermost.

    `gather_copies` and `reduce_copies`: how many more copies of a gathered or reduced buffer the
    communication library keeps. `kept_reductions`: how many inputs of reductions stay live until a later
    one needs the place.
    """

    ranks: int
    units: tuple[Unit, ...]
    gather_copies: int = 0
    reduce_copies: int = 0
    kept_reductions: int = 1


class Passage(NamedTuple):
    """A unit's forward begins or ends, after `executions` graphs have run.

    `differentiable`: one of the tensors that it was called with gets a gradient.
    """

    unit: int
    begins: bool
    executions: int
    differentiable: bool
