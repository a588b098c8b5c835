"""A tensor that several graphs use: its gradients are summed as soon as they are made, as in eager."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.runtime import graph_call
from lowtide.verification.measure_step import peak_above_start

pytestmark = pytest.mark.slow

WIDTH = 256
Loop = Callable[[nn.Module, torch.Tensor], list[Any]]


class Levels(nn.Module):
    """A head of convolutions that runs once for each level of a pyramid, in a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 9, 3, padding=1)
        self.first, self.second = (nn.Conv2d(64, 64, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        level, found = self.stem(x), []
        for _ in range(2):
            found.append(self.out(self.second(self.first(level).relu())).flatten(1))
            level = nn.functional.max_pool2d(level, 2)
            torch._dynamo.graph_break()
        return torch.cat(found, 1).square().mean()


class OneLayer(nn.Module):
    """One graph, which uses its layer twice and runs three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(torch.tanh(self.layer(x))))
            torch._dynamo.graph_break()
        return x.square().mean()


class Tied(nn.Module):
    """A weight at the start and at the end, and a value that three graphs read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.middle = nn.Parameter(torch.randn(WIDTH, WIDTH) / 16), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.tanh(x @ self.weight)
        torch._dynamo.graph_break()
        second = torch.tanh(self.middle(first)) * first
        torch._dynamo.graph_break()
        return ((second + first) @ self.weight.t()).square().mean()


def plain(model: nn.Module, x: torch.Tensor) -> list[Any]:
    model(x).backward()
    return []


def kept(model: nn.Module, x: torch.Tensor) -> list[Any]:
    loss = model(x)
    loss.backward(retain_graph=True)
    loss.backward()
    return []


def two_calls(model: nn.Module, x: torch.Tensor) -> list[Any]:
    (model(x) + 2 * model(x + 1)).backward()
    return []


def of_some(model: nn.Module, x: torch.Tensor) -> list[Any]:
    return list(torch.autograd.grad(model(x), list(model.parameters())[:1]))


def with_penalty(model: nn.Module, x: torch.Tensor) -> list[Any]:
    (model(x) + sum(p.square().sum() for p in model.parameters())).backward()
    return []


def of_the_input(model: nn.Module, x: torch.Tensor) -> list[Any]:
    x = x.clone().requires_grad_()
    model(x).backward()
    return [x.grad]


def hooked(model: nn.Module, x: torch.Tensor) -> list[Any]:
    hooks = [parameter.register_hook(lambda grad: grad * 3) for parameter in model.parameters()]
    model(x).backward()
    for hook in hooks:
        hook.remove()
    return []


LOOPS = (plain, kept, two_calls, of_some, with_penalty, of_the_input, hooked)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("make", "shape"),
    [(Levels, (1, 3, 16, 16)), (OneLayer, (64, WIDTH)), (Tied, (64, WIDTH))],
    ids=["levels", "one layer", "tied"],
)
def test_a_plan_takes_no_more_than_eager(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    planned, x = make(), torch.randn(shape)
    eager = copy.deepcopy(planned)
    profile = lowtide.profile(planned, x)
    eager_bytes = measured(eager, x)
    assert profile.peak_bytes == pytest.approx(eager_bytes, rel=0.05)
    profile.plan(eager_bytes)  # a budget that eager meets is met
    plan = profile.plan(profile.floor_bytes)
    plan.apply(planned)
    planned_bytes = measured(planned, x)
    assert planned_bytes <= min(eager_bytes, plan.budget_bytes)
    assert plan.peak_bytes == pytest.approx(planned_bytes, rel=0.01)
    for loop in LOOPS if make is OneLayer else (plain, kept):
        expected, found = run(loop, eager, x), run(loop, planned, x)
        assert len(expected) == len(found)
        for one, other in zip(expected, found, strict=True):
            assert one is other is None or torch.equal(one, other), loop.__name__


def run(loop: Loop, model: nn.Module, x: torch.Tensor) -> list[Any]:
    model.zero_grad()
    results = loop(model, x)
    return [*results, *(parameter.grad for parameter in model.parameters())]


def measured(model: nn.Module, x: torch.Tensor) -> int:
    run(plain, model, x)
    model.zero_grad()
    held = sum(parameter.nbytes for parameter in model.parameters()) + x.nbytes
    return held + peak_above_start(lambda: plain(model, x))


def test_each_gradient_leaves_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight and bias of two uses, and the value between the graphs at the end."""
    seen: list[int] = []
    advance = graph_call.Chain._advance

    def count(chain: graph_call.Chain) -> list[Any]:
        gradients = advance(chain)
        seen.append(len(gradients))
        return gradients

    monkeypatch.setattr(graph_call.Chain, "_advance", count)
    model, x = OneLayer(), torch.randn(8, WIDTH)
    lowtide.checkpoint(model, x, budget="100%")
    model(x).backward()
    assert seen == [0, 1, 1, 1, 1, 1] * 2 + [0, 1, 1, 1, 1]
