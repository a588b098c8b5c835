"""What a method is: one way to bring a forward value back in the backward pass, told in one place.

A method answers which nodes it fits and why not (`why_not`), what runs in the backward pass and what that
reads (`call`), what the forward pass keeps for it besides its own values (`kept`), which blocks it makes
(`blocks`), what it costs (`costs_as_first`, `workspace_bytes`), and what files and reports call it
(`name`, `words`, `action`). Capture, profiling, rewriting and reports ask nothing else of it.
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
    """One tensor that the forward pass makes for a method and keeps, besides its own values.

    `call` has nodes of the graph among its arguments and makes the tensor; it runs right `before` the
    node, or right after it. `value` is a fake tensor of the result. What is not `timed` costs nothing to
    speak of. With `begin`, a plan chooses the place of `call` in the forward pass: `begin(store, value)` runs
    right after the node, where `store` is the number of the model's store, and `call` gets its result in the
    place of the value.
    """

    name: str
    call: Call
    value: Any
    before: bool = False
    timed: bool = True
    begin: Target | None = None


class RematRule(ABC):
    """One way to bring a value back. Methods have no state: one instance serves all graphs."""

    name: ClassVar[str]
    """in files: `replay`"""
    words: ClassVar[str]
    """in reports: `drawn again from its random state`"""
    action: ClassVar[Action] = Action.RECOMPUTE
    """what a plan does with a value that it brings back so"""
    costs_as_first: ClassVar[bool] = False
    """whether a run costs what the node's own op does; else its `call` is timed, but for those that offload:
    they cost the time that the step waits for them"""
    as_eager_only: ClassVar[bool] = False
    """whether it gives the bits of eager's ops on a CPU alone: compiled graphs, and plans for a GPU that is
    not here, must do without it"""
    wait: ClassVar[Target | None] = None
    """what turns the result of a run into the value, once its first reader needs it"""

    @abstractmethod
    def why_not(self, node: fx.Node) -> str | None:
        """Empty where the method fits a forward node; None where the node is none of its business, and
        else why it cannot be used though it should."""

    @abstractmethod
    def call(self, node: fx.Node, kept: tuple[Kept, ...]) -> Call:
        """What runs in the backward pass. Its arguments are nodes of the graph, whose values it reads,
        the `kept` tensors, and constants."""

    def replaces_chain(self, node: fx.Node) -> bool:
        """Whether `call` can run a backward op in another way, in the place of those that lead to it alone,
        too. Such a method keeps nothing."""
        return False

    def kept(self, node: fx.Node) -> tuple[Kept, ...]:
        """What the forward pass keeps for it."""
        return ()

    def blocks(self, node: fx.Node, *, makes: Blocks, holds: Blocks) -> tuple[Blocks, Blocks]:
        """Which storages a run makes anew and which its value holds, given those of the first run."""
        return makes, holds

    def workspace_bytes(self, node: fx.Node) -> int:
        """Bytes held inside a run that neither its first run nor a timed one shows."""
        return 0
