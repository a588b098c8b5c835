"""What a case of the coverage table is: a model, its batch, and a loop that trains it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.trace.model_call import call, loss_of

Values = Iterator[Any]
STEPS = 3


def plain_loop(training: "Training") -> Values:
    for _ in range(STEPS):
        yield from step(training)


@dataclass(frozen=True, slots=True)
class Training:
    """A model and all that trains it; `loop` yields whatever has to be equal with and without lowtide,
    as it is then.

    `batch` and `loss` are what lowtide plans for; a loop may use others besides. `loop_bytes` is what
    the loop holds of its own beside the step, such as other batches: no plan is about that. `accumulate`:
    gradients are there when a step begins, and lowtide is told so.
    """

    model: nn.Module
    batch: Any
    optimizer: torch.optim.Optimizer | None = None
    loss: Callable[[Any], torch.Tensor] | None = None
    loop: Callable[["Training"], Values] = plain_loop
    loop_bytes: int = 0
    accumulate: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table. `build` is called in the process that runs the case."""

    name: str
    group: str
    build: Callable[[], Training]


def step(training: Training, batch: Any = None) -> Values:
    """Forward, backward and optimizer step; yields the loss and all gradients before the latter."""
    value = forward(training, batch)
    value.backward()
    yield [value.detach(), *gradients(training.model)]
    update(training)


def forward(training: Training, batch: Any = None) -> torch.Tensor:
    return loss_of(call(training.model, training.batch if batch is None else batch), training.loss)


def update(training: Training) -> None:
    if training.optimizer is not None:
        training.optimizer.step()
    training.model.zero_grad(set_to_none=True)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Those that there are, after a tensor that says for which parameters."""
    found = [parameter.grad for parameter in model.parameters()]
    return [torch.tensor([grad is not None for grad in found]), *(g for g in found if g is not None)]


def adam(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr)
