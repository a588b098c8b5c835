"""`optimizer.step(closure)`, as Lightning calls it: the closure runs the forward and the backward pass.

Several optimizers as one, wherever one is expected, and the way in which they step where nobody chose.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lowtide.errors import LowtideError

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


Optimizer = torch.optim.Optimizer


class Together(Optimizer):
    """Optimizers that take their steps one after the other. They stay the user's own."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        # what torch would set up belongs to each of them
        self.optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """By position and by what each of them has it under: two of them may share a parameter."""
        states = enumerate(optimizer.state for optimizer in self.optimizers)
        return {(index, key): values for index, state in states for key, values in state.items()}

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step(closure) if closure is not None else optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.optimizers = state["optimizers"]

    def __repr__(self) -> str:
        return f"Together({', '.join(type(optimizer).__name__ for optimizer in self.optimizers)})"


def each_of(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that really take the steps: those behind several as one, or behind one that only passes
    on what it is asked, as accelerate's does."""
    if isinstance(optimizer, Together):
        return [one for each in optimizer.optimizers for one in each_of(each)]
    inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    if isinstance(getattr(type(optimizer), "param_groups", None), property) and len(inner) == 1:
        return each_of(inner[0])
    return [optimizer]


def as_one(optimizer: Any) -> Optimizer | None:
    """One optimizer of what a user passes: an optimizer, a list or tuple of them, or None."""
    if optimizer is None or isinstance(optimizer, Optimizer):
        return optimizer
    if isinstance(optimizer, (list, tuple)) and all(isinstance(each, Optimizer) for each in optimizer):
        if len(optimizer) < 2:
            return optimizer[0] if optimizer else None
        return Together(optimizer)
    raise LowtideError(
        f"the optimizer is a {type(optimizer).__name__}: pass a torch.optim.Optimizer, or a list of them"
    )
