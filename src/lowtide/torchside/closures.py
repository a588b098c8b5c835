"""`optimizer.step(closure)`, as Lightning calls it: the closure runs the forward and the backward pass."""

from collections.abc import Mapping
from typing import Any

import torch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def has_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a step was called with anything; the first of `args` is the optimizer."""
    return any(given is not None for given in (*args[1:], *kwargs.values()))


def closure_done(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments | None:
    """Run the closure that a step was given, and give the arguments for it with one that knows the loss.

    That is what the step would do before all else. None where it may do otherwise: an optimizer that is not
    torch's own, one that runs its closure several times, or other arguments.
    """
    optimizer, *given = args
    closures = [one for one in (*given, *kwargs.values()) if one is not None]
    own = type(optimizer)
    is_torchs = own.__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS)
    if len(closures) != 1 or not callable(closures[0]) or not is_torchs:
        return None
    with torch.enable_grad():
        loss = closures[0]()
    return (optimizer, lambda: loss), {}
