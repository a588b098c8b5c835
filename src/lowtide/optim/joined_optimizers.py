"""Several optimizers as one, the optimizers inside of one, and steps that are called with a closure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lowtide.errors import LowtideError

Optimizer = torch.optim.Optimizer
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class JoinedOptimizer(Optimizer):
    """Optimizers that take their steps one after the other; not copies, but the user's own."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        # torch's own attributes belong to each of the optimizers
        self.optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """By the optimizer's position and its own key: two optimizers may share a parameter."""
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
        return f"JoinedOptimizer({', '.join(type(optimizer).__name__ for optimizer in self.optimizers)})"


def join_optimizers(optimizer: Any) -> Optimizer | None:
    """One optimizer for a user's argument: an optimizer, a list or tuple of optimizers, or None."""
    if optimizer is None or isinstance(optimizer, Optimizer):
        return optimizer
    if isinstance(optimizer, (list, tuple)) and all(isinstance(each, Optimizer) for each in optimizer):
        if len(optimizer) < 2:
            return optimizer[0] if optimizer else None
        return JoinedOptimizer(optimizer)
    raise LowtideError(
        f"the optimizer is a {type(optimizer).__name__}: pass a torch.optim.Optimizer, or a list of them"
    )


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that take the steps: those of a joined optimizer, or the one inside a wrapper that only
    passes calls on, such as accelerate's."""
    if isinstance(optimizer, JoinedOptimizer):
        return [one for each in optimizer.optimizers for one in inner_optimizers(each)]
    inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    if isinstance(getattr(type(optimizer), "param_groups", None), property) and len(inner) == 1:
        return inner_optimizers(inner[0])
    return [optimizer]


def has_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether `step` was called with any argument; the first of `args` is the optimizer."""
    return any(given is not None for given in (*args[1:], *kwargs.values()))


def run_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments | None:
    """Run the closure of `optimizer.step(closure)`, as Lightning calls it. Returns new arguments for `step`,
    with a closure that only returns the loss.

    An optimizer of torch runs its closure first, once. None for any other optimizer or argument, and for
    LBFGS, which runs its closure several times.
    """
    optimizer, *given = args
    closures = [one for one in (*given, *kwargs.values()) if one is not None]
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    if len(closures) != 1 or not callable(closures[0]) or not is_torchs:
        return None
    if isinstance(optimizer, torch.optim.LBFGS):
        return None
    with torch.enable_grad():
        loss = closures[0]()
    return (optimizer, lambda: loss), {}
