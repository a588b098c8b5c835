"""Plan a model when it is first called to train: with the trainer's own batch, optimizer and precision.

Nothing is drawn from a data loader, and no random state moves. Calls without gradients, such as an
evaluation before the first step, run as they are.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lowtide.errors import LowtideError
from lowtide.facts.plan import offload_text, parse_offload, parse_offload_what
from lowtide.facts.sizes import check_budget, parse_size
from lowtide.runtime.executor import executor_named
from lowtide.runtime.runner import remove
from lowtide.torch_compat.modules import call_model, is_compiled, route_of, set_route
from lowtide.trace.model_call import Arguments

Meet = Callable[[nn.Module, Arguments], None]


class FirstCall:
    """Stands where a module's own code is called, until that is to be trained: then `meet` gets the call."""

    def __init__(self, module: nn.Module, meet: Meet) -> None:
        self.module, self.meet = module, meet

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not self.module.training:
            return call_model(self.module, args, kwargs)
        no_longer_await(self.module)
        self.meet(self.module, Arguments(args, kwargs))
        return self.module(*args, **kwargs)


def await_first_call(module: nn.Module, meet: Meet) -> None:
    """Let `meet` see the first call that trains `module`, before it runs. A plan of before is taken away."""
    no_longer_await(remove(module))
    if is_compiled(module):
        raise LowtideError(
            f"the {type(module).__name__} is compiled, which would go past the plan: leave out torch.compile "
            "and model.compile(), lowtide compiles by itself"
        )
    set_route(module, FirstCall(module, meet))


def no_longer_await(module: nn.Module) -> None:
    if isinstance(route_of(module), FirstCall):
        set_route(module, None)


def checked_budget(budget: str | int) -> str | int:
    """A budget that can be read; BadSize at once where it cannot, not when the first batch comes."""
    check_budget(budget)
    return budget


def checked_offload(offload: str, swap: str) -> str:
    """Where to offload to, if anywhere; refused at once where it cannot be read."""
    text = offload_text(offload, swap)
    return str(parse_offload(text)) if text else ""


def checked_offload_what(words: str | Iterable[str], *, offload: str) -> tuple[str, ...]:
    """What may wait there; refused at once where it cannot be read."""
    return parse_offload_what(words, offload=offload) or ("activations",)


def checked_reserve(reserve: str | int) -> int:
    """Bytes that can be read; BadSize at once where they cannot."""
    return parse_size(reserve) if reserve else 0


def checked_executor(executor: str) -> str:
    """The name of an executor that is there; refused at once where it is not."""
    return executor_named(executor).name
