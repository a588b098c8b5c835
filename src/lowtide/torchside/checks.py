"""Checks that an op of linear algebra went well, traced as the ops they are.

torch keeps `_linalg_check_errors`, which returns nothing and raises for a singular matrix, in its order by a
token, and that is one input and one output more than the model has. Our graphs keep the order of their ops
anyway, so that a check stays where it stands as long as it is not taken for dead code.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch.fx.node import has_side_effect

NAME = "aten::_linalg_check_errors"


@contextlib.contextmanager
def traced_without_tokens() -> Iterator[None]:
    """Trace checks as ops of the graph, which are never dropped."""
    has_side_effect(torch.ops.aten._linalg_check_errors.default)
    holder = torch._library.simple_registry.singleton.find(NAME).effect
    effect = holder.effect
    holder.register(None)
    try:
        yield
    finally:
        holder.register(effect)
