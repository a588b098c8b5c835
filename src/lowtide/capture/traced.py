"""A model that was traced once, at capture, and waits for the plan that it will run by."""

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lowtide.capture.graphs import Segment
from lowtide.torchside.dynamo import Compiled

Function = Callable[[list[Any]], Any]


@dataclass(slots=True)
class TracedGraph:
    """A graph that torch has compiled to whatever `forward` is, and the function that `backward` makes when
    its first gradients come.

    `inputs` are fake tensors like those that it takes; `gradients` tells for each whether torch will ask for
    its gradient. `compiled` is what torch has made of it, and is called with its inputs; `key` is None where
    that holds for this one call of the function only.
    """

    segment: Segment
    inputs: Sequence[Any]
    forward: Function
    backward: Callable[[], Function]
    gradients: tuple[bool, ...]
    key: Hashable | None = None
    compiled: Callable[..., Any] = field(init=False)

    def run(self, *inputs: Any) -> Any:
        """What torch calls: a plan changes what that is."""
        return self.compiled(*inputs)


class TracedModel:
    """What torch compiled for a model of one graph: its first step by a plan needs no tracing any more."""

    def __init__(self, model: nn.Module, compiled: Compiled, graph: TracedGraph) -> None:
        self.compiled = compiled
        self.graph = graph
        self._model = weakref.ref(model)
        self._is_taken = False

    def take(self, model: nn.Module) -> bool:
        """Whether this is `model`, and nobody has taken it before: it can run by one plan only."""
        if self._is_taken or self._model() is not model:
            return False
        self._is_taken = True
        return True
