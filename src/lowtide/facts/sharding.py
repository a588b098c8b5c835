"""How the parameters of a model are divided among processes: what each of them holds and exchanges.

A unit is a module that `fully_shard` was called on: its parameters are gathered before its forward and its
backward pass, given back after them, and its gradients are reduced when its backward pass is over.
"""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One parameter of a unit. All bytes are padded to the same size on every process.

    `shard_bytes` are stored here, `whole_bytes` those of the gathered parameter in the type that computes;
    `reduced_bytes` the whole gradient in the type that is reduced, `gradient_bytes` this process's part of
    it in the type that the optimizer reads. `cast_bytes`: what is gathered, where its type is not the
    stored one.
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

    `frees_after_forward`: it gives them back after the forward pass, and gathers them again for backward.
    `root` is the index of the outermost unit around it. `prefetches_forward` and `prefetches_backward` are
    the units that the user wants gathered ahead; None is the default, the unit before it in backward.
    """

    name: str
    parts: tuple[Part, ...]
    frees_after_forward: bool
    root: int
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
    """The units of a model on `ranks` processes, those outside first.

    `gather_copies` and `reduce_copies`: how many more copies of what is gathered or reduced the
    communication library holds inside. `kept_reductions`: how many inputs of reductions are kept until a
    later one needs their place.
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
