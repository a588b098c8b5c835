"""What a remat rule is: one way to have a forward value again in the backward pass.

A rule answers which nodes it fits (`why_not`), what runs in the backward pass and what that reads (`call`),
what the forward pass keeps for it besides its own values (`kept`), which storages it makes (`blocks`), what
it costs (`costs_as_first`, `workspace_bytes`), and what files and reports call it (`name`, `words`,
`action`). Capture, profiling, rewriting and reports ask nothing else.
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
    With `begin`, a plan chooses the place of `call` in the forward pass: `begin(store, value)` runs right
    after the node, where `store` is the number of the model's store, and `call` gets its result instead of
    the value.
    """

    name: str
    call: Call
    value: Any
    before: bool = False
    timed: bool = True
    begin: Target | None = None


class RematRule(ABC):
    """One way to rematerialize a value. A rule has no state: one instance serves all graphs."""

    name: ClassVar[str]
    """in files: `replay`"""
    words: ClassVar[str]
    """in reports: `drawn again from its random state`"""
    action: ClassVar[Action] = Action.RECOMPUTE
    """what a plan does with a value that it rematerializes so"""
    costs_as_first: ClassVar[bool] = False
    """whether a run costs what the node's own op does; else its `call` is timed. A transfer costs only the
    time that the step waits for it"""
    as_eager_only: ClassVar[bool] = False
    """whether the rule gives the bits of eager's ops on a CPU only: compiled graphs, and plans for an absent
    GPU, do without it"""
    wait: ClassVar[Target | None] = None
    """what turns the result of a run into the value, once its first reader needs it"""

    @abstractmethod
    def why_not(self, node: fx.Node) -> str | None:
        """Empty if the rule fits a forward node; None if it is for other kinds of nodes; else the reason why
        it cannot be used."""

    @abstractmethod
    def call(self, node: fx.Node, kept: tuple[Kept, ...]) -> Call:
        """What runs in the backward pass. Its arguments are nodes of the graph, whose values it reads,
        the `kept` tensors, and constants."""

    def replaces_chain(self, node: fx.Node) -> bool:
        """Whether `call` can run a backward op together with the chain of ops before it (see `replaced_ops`).
        Such a rule keeps nothing."""
        return False

    def kept(self, node: fx.Node) -> tuple[Kept, ...]:
        """What the forward pass keeps for the rule."""
        return ()

    def blocks(self, node: fx.Node, *, makes: Blocks, holds: Blocks) -> tuple[Blocks, Blocks]:
        """Which storages a run makes and which its value refers to, given those of the first run."""
        return makes, holds

    def workspace_bytes(self, node: fx.Node) -> int:
        """Workspace of a run that neither its first run nor a timed run shows."""
        return 0
