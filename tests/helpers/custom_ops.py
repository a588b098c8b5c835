"""Custom ops, honest and not, and a small model that calls one of them after each layer."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor, nn

ROWS, WIDTH = 256, 32
SPACE = "lt_trials"

_calls = [0]
_shelf = torch.zeros(ROWS, WIDTH)


def pure(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2


def counting(x: Tensor) -> Tensor:
    _calls[0] += 1
    return x + _calls[0]


def drawing(x: Tensor) -> Tensor:
    return x + torch.rand(()) * 0


def drawing_in_python(x: Tensor) -> Tensor:
    return x + 0 * random.random()


def drawing_in_numpy(x: Tensor) -> Tensor:
    return x + 0 * float(numpy.random.rand())


def writing(x: Tensor) -> Tensor:
    made = x + 1
    x.mul_(2)
    return made


def raising(x: Tensor) -> Tensor:
    if not x.all():
        raise ValueError("only for sorted input")
    return x + 1


def shelved(x: Tensor) -> Tensor:
    return _shelf.copy_(x)


def elsewhere(x: Tensor) -> Tensor:
    """Depends on where its input is."""
    return x + (x.data_ptr() >> 4) % 1009


def tagged(x: Tensor) -> Tensor:
    return x + torch.rand(())


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    (output,) = ctx.saved_tensors
    return grad * (output.square() + 1).rsqrt()


def _registered(run: Callable[[Tensor], Tensor], *tags: torch.Tag) -> Any:
    made = torch.library.custom_op(f"{SPACE}::{run.__name__}", run, mutates_args=(), tags=tags)
    made.register_fake(torch.empty_like)
    made.register_autograd(_backward, setup_context=_save)
    return made


OPS = {
    run.__name__: _registered(run)
    for run in (
        pure,
        counting,
        drawing,
        drawing_in_python,
        drawing_in_numpy,
        writing,
        raising,
        shelved,
        elsewhere,
    )
}
OPS["tagged"] = _registered(tagged, torch.Tag.nondeterministic_seeded)


@torch.library.custom_op(f"{SPACE}::parts", mutates_args=())
def parts(x: Tensor) -> list[Tensor]:
    """Several results, in a list."""
    return [torch.tanh(x) * 2, x.sum(1)]


@parts.register_fake
def _parts(x: Tensor) -> list[Tensor]:
    return [torch.empty_like(x), x.new_empty(x.shape[0])]


parts.register_autograd(
    lambda ctx, grads: grads[0] * ctx.saved_tensors[0] + grads[1][:, None],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[0]),
)


@torch.library.custom_op(f"{SPACE}::told", mutates_args=("seen",))
def told(x: Tensor, seen: Tensor) -> None:
    """Writes to an argument, as its schema says, and returns nothing."""
    seen.add_(x.detach().sum())


class Layers(nn.Module):
    """A linear layer and a custom op, several times."""

    def __init__(self, name: str = "pure", layers: int = 4, overload: bool = False) -> None:
        super().__init__()
        self.name = name
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.name == "parts":
                x, sums = parts(x)
                x = x + sums[:, None]
            elif self.name == "told":
                told(x, self.seen)
                x = OPS["pure"](x)
            else:
                x = OPS[self.name](x)
        return x.square().mean()
