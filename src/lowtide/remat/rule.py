"""The interface of a remat rule: one way to rematerialize forward values of one kind.

- `why_not`: which nodes the rule fits
- `call`: what runs in the backward pass, and what this call reads
- `kept`: what the forward pass keeps for the rule besides its own values
- `blocks`: which storages a run makes
- `costs_as_first`, `workspace_bytes`: what a run costs
- `name`, `words`, `action`: the rule in files and reports

Capture, profiling, rewriting and reports ask a rule nothing else.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from lowtide.facts import Action
from lowtide.ops.calls import Call, Target

Blocks = tuple[int, ...]
"""Storage ids."""


@dataclass(frozen=True, eq=False)
class Kept:
    """One tensor that the forward pass makes for a rule and keeps, besides its own values.

    `call` makes the tensor, right `before` the node or right after it; nodes of the graph are among its
    arguments. `value` is a fake tensor like the result. A call that is not `timed` takes next to no time.
    With `begin`, a plan chooses the time point of `call` in the forward pass: `begin(store, value)` runs
    right after the node, where `store` is the number of the model's store, and `call` gets the result of
    `begin` instead of the value.
    """

    name: str
    call: Call
    value: Any
    before: bool = False
    timed: bool = True
    begin: Target | None = None


class RematRule(ABC):
    """A rule has no state: one instance serves all graphs."""

    name: ClassVar[str]
    """in files: `replay`"""
    words: ClassVar[str]
    """in reports: `drawn again from its random state`"""
    action: ClassVar[Action] = Action.RECOMPUTE
    """what a plan that uses the rule does with the value"""
    costs_as_first: ClassVar[bool] = False
    """whether a run costs as much as the node's own op; else `call` is timed. A transfer costs only the time
    that the step waits for it"""
    as_eager_only: ClassVar[bool] = False
    """whether the rule gives the bits of eager's ops on a CPU only: compiled graphs, and plans for an absent
    GPU, do without it"""
    wait: ClassVar[Target | None] = None
    """what turns the result of a run into the value, once its first reader needs it"""

    @abstractmethod
    def why_not(self, node: fx.Node) -> str | None:
        """Empty if the rule fits a forward node; None if the rule is for other kinds of nodes; else why the
        rule does not fit."""

    @abstractmethod
    def call(self, node: fx.Node, kept: tuple[Kept, ...]) -> Call:
        """The call that runs in the backward pass. Its arguments are nodes of the graph, the `kept` tensors,
        and constants."""

    def replaces_chain(self, node: fx.Node) -> bool:
        """Whether `call` can run a backward op together with the chain of ops before it (see `replaced_ops`).
        Such a rule keeps nothing."""
        return False

    def kept(self, node: fx.Node) -> tuple[Kept, ...]:
        """The tensors that the forward pass keeps for the rule."""
        return ()

    def blocks(self, node: fx.Node, *, makes: Blocks, holds: Blocks) -> tuple[Blocks, Blocks]:
        """The storages that a run makes, and those that its value refers to, given both of the first run."""
        return makes, holds

    def workspace_bytes(self, node: fx.Node) -> int:
        """Workspace of a run that neither the node's first run nor a timed run shows."""
        return 0
