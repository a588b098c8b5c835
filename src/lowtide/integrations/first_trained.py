"""Plan the first model that a script trains, at its first batch, without a change of the script.

    with first_trained(plan):            plan gets the module, the arguments of the call, and its optimizers
        runpy.run_path("train.py")

The model is the first module that is called from outside of other modules, with gradients, and that has
parameters of an optimizer. Until then calls of modules and constructions of optimizers are seen; from then on
the process runs as without this block.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lowtide.torch_compat.modules import calls_and_optimizers_seen
from lowtide.trace.model_call import Arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """The first model that trains: its first call, its optimizers, and the optimizers of other parameters.

    `num_outside`: parameters of its optimizers that are not the model's.
    """

    module: nn.Module
    call: Arguments
    optimizers: tuple[Optimizer, ...]
    others: tuple[Optimizer, ...]
    num_outside: int


@contextmanager
def first_trained(plan: Callable[[TrainedModel], None]) -> Iterator[None]:
    """Let `plan` have the first model that trains inside of this block, before its call runs."""
    made: list[weakref.ref[Optimizer]] = []

    def meet(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or not any(inner.training for inner in module.modules()):
            return
        optimizers = [optimizer for reference in made if (optimizer := reference()) is not None]
        found = _trained(module, Arguments(args, kwargs), optimizers)
        if found is not None:
            end()
            plan(found)

    with calls_and_optimizers_seen(meet, lambda optimizer: made.append(weakref.ref(optimizer))) as end:
        yield


def _trained(module: nn.Module, call: Arguments, optimizers: Sequence[Optimizer]) -> TrainedModel | None:
    own = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    holds = [own & {id(parameter) for parameter in parameters_of(optimizer)} for optimizer in optimizers]
    mine = tuple(optimizer for optimizer, held in zip(optimizers, holds, strict=True) if held)
    if not mine:
        return None
    return TrainedModel(
        module=module,
        call=call,
        optimizers=mine,
        others=tuple(optimizer for optimizer, held in zip(optimizers, holds, strict=True) if not held),
        num_outside=sum(id(parameter) not in own for one in mine for parameter in parameters_of(one)),
    )


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
