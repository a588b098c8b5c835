"""Python's random numbers under Dynamo: a model draws them between two graphs, as in eager.

    x = self.first(x)                 graph
    scale = random.uniform(0.5, 1.5)  Python draws
    return self.second(x) * scale     graph; the number is an input once it has changed

torch would replay the draw before the graph and pass the number as a tensor: a number that decides a shape
or a branch has no guard then, ops on a tensor and on a number can round differently, and the state of a
model's own `random.Random` is fixed as it was while torch traced. Numbers of numpy are drawn between graphs
by `dynamo.settings`.

Shortcoming: every draw ends a graph, also one that only scales a value.
"""

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import Any

from torch._dynamo.exc import unimplemented
from torch._dynamo.variables import misc, user_defined

DRAW = "random number of Python"
"""The name of the cause of a graph break, as torch names them."""


@contextlib.contextmanager
def draws_between_graphs() -> Iterator[None]:
    """While torch traces: a graph ends before each use of Python's `random`."""
    with (
        unittest.mock.patch.object(user_defined, "call_random_fn", _draw),
        unittest.mock.patch.object(misc, "call_random_fn", _draw),
        unittest.mock.patch.object(misc.RandomVariable, "call_method", _call, create=True),
        unittest.mock.patch.object(misc.RandomClassVariable, "call_function", _make),
    ):
        yield


def _draw(_tx: Any, function: Any, *_args: Any, **_kwargs: Any) -> Any:
    _end_graph(getattr(function, "__qualname__", str(function)))


def _call(_generator: Any, _tx: Any, name: str, *_args: Any, **_kwargs: Any) -> Any:
    _end_graph(f"Random.{name}")


def _make(_class: Any, _tx: Any, *_args: Any, **_kwargs: Any) -> Any:
    _end_graph("Random")


def _end_graph(name: str) -> None:
    unimplemented(
        gb_type=DRAW,
        context=name,
        explanation=f"the function `{name}` draws in every call",
        hints=[],
    )
