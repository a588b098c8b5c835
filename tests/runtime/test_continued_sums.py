"""Gradients of tensors that a planned graph uses several times and the user's loop again, in eager's order.

Eager adds one gradient after the other, from the last use to the first. Each case differs in its last bits
where a graph adds up its own uses first.
"""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.torch_compat import gradient_edges

pytestmark = pytest.mark.slow

WIDTH = 48
X = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3))
SEQUENCES = X.view(8, 8, WIDTH)
TOKENS = torch.arange(60) % 30


class Module(nn.Module):
    """A module with these `parts` and this `forward`."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any) -> Any:
        return self.run(self, *args)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def mlp() -> nn.Module:
    return nn.Sequential(linear(), nn.Tanh(), linear())


def square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def penalty(model: nn.Module) -> torch.Tensor:
    return torch.stack([p.square().sum() + p.abs().sum() for p in model.parameters()]).sum() * 0.01


def _repeated(self: Any, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = torch.tanh(self.a(x))
    return x


def repeated() -> nn.Module:
    return Module(_repeated, a=linear())


def _broken(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = torch.tanh(self.a(torch.tanh(self.a(x))))
    torch._dynamo.graph_break()
    return torch.tanh(self.a(torch.tanh(self.a(x))))


def _passes(self: Any, x: torch.Tensor) -> torch.Tensor:
    """The gradients of `h` are added up before they are one gradient of `p`."""
    first = self.p.tanh()
    h = x + self.p
    return self.a(h) * h * self.a(h) + first


def _pointwise(self: Any, x: torch.Tensor) -> torch.Tensor:
    w = self.p
    return w * torch.tanh(w) * 0.5 * (1 + torch.erf(w / 1.4)) + w.sigmoid() * w * x


def _doubled(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.a(self.p + self.p) * self.p * x


def _recurrent(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.r(self.r(x)[0])[0]


def _tied(self: Any, tokens: torch.Tensor) -> torch.Tensor:
    return torch.tanh(self.e(tokens) @ self.e.weight.t() @ self.e.weight)


def block() -> nn.Module:
    """A planned block inside of an eager model."""
    return Module(lambda _, x: x, e=linear(), b=Module(lambda s, x: x + s.c(x) + s.d(x), c=mlp(), d=mlp()))


def after(model: Any) -> None:
    (square(model(X)) + penalty(model)).backward()


def before_and_after(model: Any) -> None:
    first = penalty(model)
    (square(model(X)) + first + penalty(model)).backward()


def orthogonal(model: Any) -> None:
    weight = model.a.weight
    (square(model(X)) + (weight @ weight.t() - torch.eye(WIDTH)).square().sum()).backward()


def two_calls(model: Any) -> None:
    first, between = model(X), penalty(model)
    (square(first) + between + square(model(X * 0.3 + first)) + penalty(model)).backward()


def accumulated(model: Any) -> None:
    for number in range(2):
        (square(model(X[: 64 - 8 * number])) + penalty(model)).backward()


def again(model: Any) -> None:
    loss = square(model(X)) + penalty(model)
    loss.backward(retain_graph=True)
    loss.backward()


def by_grad(model: Any) -> None:
    loss = square(model(X)) + penalty(model)
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient


def sequences(model: Any) -> None:
    (square(model(SEQUENCES)) + penalty(model)).backward()


def tied(model: Any) -> None:
    logits = F.linear(model(TOKENS), model.e.weight)
    sparse = F.embedding(TOKENS, model.e.weight, sparse=True)
    (F.cross_entropy(logits, TOKENS) + sparse.square().sum()).backward()


def skip(model: Any) -> None:
    h = model.e(X)
    square(model.b(h) + h.tanh()).backward()


def also_a_root(model: Any) -> None:
    h = model.e(X)
    torch.autograd.backward([square(model.b(h)), h], [None, torch.full_like(h, 0.37)])


def large(model: Any) -> None:
    (square(model(LARGE)) + penalty(model)).backward()


Case = tuple[Callable[[], nn.Module], Any, Callable[[Any], None]]
LARGE = torch.ones(512, 512)
CASES: dict[str, Case] = {
    "penalty": (repeated, X, after),
    "penalty before and after": (repeated, X, before_and_after),
    "orthogonality": (repeated, X, orthogonal),
    "two calls": (repeated, X, two_calls),
    "accumulated": (repeated, X, accumulated),
    "backward twice": (repeated, X, again),
    "autograd.grad": (repeated, X, by_grad),
    "two graphs": (lambda: Module(_broken, a=linear()), X, after),
    "sum that passes": (lambda: Module(_passes, p=nn.Parameter(X.flip(0)), a=linear()), X, after),
    "same use twice": (lambda: Module(_doubled, p=nn.Parameter(X.flip(0)), a=linear()), X, after),
    "chain in chunks": (lambda: Module(_pointwise, p=nn.Parameter(torch.randn(512, 512))), LARGE, large),
    "layer of cells": (lambda: Module(_recurrent, r=nn.GRU(WIDTH, WIDTH)), SEQUENCES, sequences),
    "tied": (lambda: Module(_tied, e=nn.Embedding(30, WIDTH)), TOKENS, tied),
    "skip": (block, X, skip),
    "root": (block, X, also_a_root),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_the_loop_uses_what_the_model_uses_several_times(name: str) -> None:
    make, batch, loop = CASES[name]
    torch.manual_seed(0)
    planned = make()
    eager = copy.deepcopy(planned)
    part = planned.b if hasattr(planned, "b") else planned
    if part is planned:
        found = lowtide.profile(part, batch, loss=square)
    else:
        found = lowtide.profile(part, batch.clone().requires_grad_())
    found.plan(found.floor_bytes).apply(part)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (planned, eager)]
    for _ in range(2):
        for model, optimizer in zip((planned, eager), optimizers, strict=True):
            optimizer.zero_grad()
            loop(model)
        assert all(torch.equal(ours.grad, theirs.grad) for ours, theirs in _pairs(planned, eager))
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(ours, theirs) for ours, theirs in _pairs(planned, eager))


def _pairs(one: nn.Module, other: nn.Module) -> Any:
    return zip(one.parameters(), other.parameters(), strict=True)


def _gradient_of(model: nn.Module, z: torch.Tensor) -> torch.Tensor:
    z = z.clone().requires_grad_()
    (square(model(z)) + z.square().sum() * 0.01).backward()
    assert z.grad is not None
    return z.grad


def test_a_trained_input_with_a_prior() -> None:
    torch.manual_seed(0)
    planned = Module(
        lambda s, z: s.b(torch.cat([torch.tanh(s.a(z)), z], 1)), a=linear(), b=nn.Linear(2 * WIDTH, WIDTH)
    )
    eager = copy.deepcopy(planned)
    lowtide.checkpoint(planned, X.clone().requires_grad_(), budget="100%", loss=square)
    assert torch.equal(_gradient_of(planned, X), _gradient_of(eager, X))


def _returned(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first = torch.tanh(self.a(x))
    second = torch.tanh(self.a(first))
    return second, torch.tanh(self.a(second))


def test_outputs_that_get_a_gradient_in_some_steps_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A step whose loss reads more outputs than planned, and one whose loss reads fewer."""
    torch.manual_seed(0)
    planned = Module(_returned, a=linear())
    eager = copy.deepcopy(planned)
    lowtide.checkpoint(planned, X, budget="100%", loss=lambda outputs: square(outputs[0]))
    for used in ((0, 1), (0, 1), (1,)):
        for model in (planned, eager):
            model.zero_grad()
            outputs = model(X)
            (torch.stack([square(outputs[number]) for number in used]).sum() + penalty(model)).backward()
        assert all(torch.equal(ours.grad, theirs.grad) for ours, theirs in _pairs(planned, eager))


def _changing(self: Any, x: torch.Tensor) -> torch.Tensor:
    kept = x.sum(1, keepdim=True)
    x.mul_(2)
    return self.d(x) * x + kept


def test_a_forward_pass_runs_again_from_inputs_as_they_were() -> None:
    """The graph changes its input, whose later use in the loss is not planned for."""
    torch.manual_seed(0)
    planned = Module(lambda _, x: x, e=linear(), b=Module(_changing, d=mlp()))
    eager = copy.deepcopy(planned)
    lowtide.checkpoint(planned.b, X.clone().requires_grad_() * 1, budget="100%")
    for _ in range(2):
        for model in (planned, eager):
            model.zero_grad()
            h = model.e(X) * 1
            (square(model.b(h)) + h.square().sum()).backward()
        assert all(torch.equal(ours.grad, theirs.grad) for ours, theirs in _pairs(planned, eager))


def _with_view(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = torch.tanh(self.a(torch.tanh(self.a(x))))
    return x, self.a.weight.t()


def test_a_returned_view_of_a_weight_is_told_of_where_the_loss_uses_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Module(_with_view, a=linear())
    lowtide.checkpoint(model, X, budget="1GiB")
    with caplog.at_level(logging.WARNING, "lowtide"):
        square(model(X)[0]).backward()
        assert "uses a view of 'a.weight'" not in caplog.text
        for _ in range(2):
            output, view = model(X)
            (square(output) + view.square().sum()).backward()
    assert caplog.text.count("uses a view of 'a.weight'") == 1


@pytest.mark.parametrize("outside", [False, True])
def test_a_weight_that_autocast_casts_in_the_loop_as_well_is_told_of(
    outside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = repeated()
    with torch.autocast("cpu", torch.bfloat16), caplog.at_level(logging.WARNING, "lowtide"):
        lowtide.checkpoint(model, X, budget="1GiB")
        for _ in range(2):
            output = model(X)
            output = F.linear(output, model.a.weight) if outside else output
            (square(output.float()) + penalty(model)).backward()
    assert caplog.text.count("uses 'a.weight' outside of the model, too, cast") == outside


def test_nothing_of_torch_stays_replaced() -> None:
    torchs = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    model = repeated()
    lowtide.checkpoint(model, X, budget="1GiB", loss=square)
    output = model(X)
    assert torch.autograd._engine_run_backward is not torchs  # type: ignore[attr-defined]
    (square(output) + penalty(model)).backward()
    del output
    assert torch.autograd._engine_run_backward is torchs  # type: ignore[attr-defined]
    assert not gradient_edges._RECEIVING
