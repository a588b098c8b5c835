"""What forwards do besides computing: each stands between the two blocks of the small model."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import torch

from .case import Case, Training
from .net import Net, training_of


def _numpy(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * torch.from_numpy(numpy.random.rand(x.shape[-1]).astype("float32"))


def _python_random(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * random.random()


def _item(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x / max(1.0, x.detach().abs().max().item())


def _prints(model: Any, x: torch.Tensor) -> torch.Tensor:
    print(end="")
    return x.tanh()


def _branches_on_values(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x.tanh() if x.sum() > 0 else x.sin()


def _counts_calls(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return x.tanh()


def _drops_layers(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x if torch.rand([]) < 0.5 else x.tanh()


def _never_drops_layers(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x if torch.rand([]) < 0.0 else x.tanh()


def _asks_whether_it_is_compiled(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x.sin() if torch.compiler.is_compiling() else x.tanh()


def _catches(model: Any, x: torch.Tensor) -> torch.Tensor:
    try:
        return x.view(7, -1)
    except RuntimeError:
        return x.tanh()


@torch._dynamo.disable
def _not_followed(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x.tanh()


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.exp()


def _own_function(model: Any, x: torch.Tensor) -> torch.Tensor:
    return _Function.apply(x)


def _with(middle: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[], Training]:
    return partial(training_of, model=partial(Net, middle))


FORWARD: dict[str, Callable[[], Training]] = {
    "numpy-in-forward": _with(_numpy),
    "python-random-in-forward": _with(_python_random),
    "item-in-forward": _with(_item),
    "print-in-forward": _with(_prints),
    "branch-on-values": _with(_branches_on_values),
    "counts-its-calls": _with(_counts_calls),
    "drops-layers": _with(_drops_layers),
    "never-drops-layers": _with(_never_drops_layers),
    "asks-whether-compiled": _with(_asks_whether_it_is_compiled),
    "exception-in-forward": _with(_catches),
    "function-not-followed": _with(_not_followed),
    "own-autograd-function": _with(_own_function),
}
FORWARDS = [Case(name, "loop", build) for name, build in FORWARD.items()]
