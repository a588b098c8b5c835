"""Outputs without a gradient: what is left of the backward pass rounds as eager's does."""

from collections.abc import Callable

import pytest
import torch
from budgets import between
from torch import nn
from torch.nn import functional as F
from training import differences, train, twin

import lowtide
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow

ROWS, LENGTH, HEADS, WIDTH = 4, 33, 3, 8


class ReturnsKeys(nn.Module):
    """Keys in the order of heads are returned beside the loss, as a decoder's cache does."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        keys = (self.scale * self.project(x).view(ROWS, LENGTH, HEADS, WIDTH).transpose(1, 2)).contiguous()
        mixed = keys.transpose(1, 2).reshape(ROWS, LENGTH, HEADS * WIDTH).exp()
        return {"loss": mixed.square().mean(), "keys": keys}


def test_the_sum_with_a_missing_gradient_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = ReturnsKeys()
    batch = torch.randn(ROWS, LENGTH, HEADS * WIDTH)
    target = Target("keys", model, batch, torch.optim.SGD(model.parameters(), lr=0.1))
    expected = train(twin(target))
    found = lowtide.profile(target.model, target.batch, optimizer=target.optimizer)
    assert not any(node.op.startswith("aten.full") for node in found.step.nodes)
    planned = twin(target)
    found.plan(between(found, 1)).apply(planned.model)
    assert differences(expected, train(planned)) == []


class Outputs(nn.Module):
    """Returns values without a gradient beside a loss that reads them only through a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.other = (nn.Linear(16, 32) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(2.6592))

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> dict[str, torch.Tensor]:
        raise NotImplementedError


class Contrasts(Outputs):
    """Logits of two towers, beside their transposed view."""

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> dict[str, torch.Tensor]:
        similar = F.normalize(self.one(one)) @ F.normalize(self.other(other)).t() * self.scale.exp()
        own = torch.arange(len(similar))
        loss = F.cross_entropy(similar, own) + F.cross_entropy(similar.t(), own)
        return {"loss": loss, "of_other": similar.t(), "of_one": similar}


class AddsLater(Outputs):
    """The gradient of the returned value is read again after it was added to another."""

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> dict[str, torch.Tensor]:
        first = (self.first(one) @ other.repeat(1, 2).t()).tanh()
        similar = F.normalize(self.one(one)) @ F.normalize(self.other(other)).t() * self.scale.exp()
        spread = similar.exp().mean()
        logits = similar + first
        loss = F.cross_entropy(logits.t(), torch.arange(len(logits))) + spread
        return {"loss": loss, "of_one": logits}


class ReadsAgain(Outputs):
    """The gradient of the returned value is a view of one that is read again."""

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = len(one)
        first = (self.first(one) @ other.repeat(1, 2).t()).sigmoid().view(rows, 1, rows)
        similar = (self.one(one) @ self.other(other).t() * self.scale).tanh().view(rows, 1, rows) + 1
        return {"loss": (similar.transpose(0, 2) + first).square().sum(), "of_one": similar}


def loss_alone(output: dict[str, torch.Tensor]) -> torch.Tensor:
    return output["loss"]


def loss_and_output(output: dict[str, torch.Tensor]) -> torch.Tensor:
    return output["loss"] + output["of_one"].tanh().sum()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "planned_for"),
    [(Contrasts, loss_alone), (ReadsAgain, loss_alone), (AddsLater, loss_and_output)],
    ids=["strides", "storage", "known when backward begins"],
)
def test_a_term_takes_the_place_of_its_sum_with_strides_and_storage(
    kind: type[Outputs], planned_for: Callable[[dict[str, torch.Tensor]], torch.Tensor]
) -> None:
    for rows in (5, 11):
        torch.manual_seed(rows)
        model, batch = kind(), (torch.randn(rows, 16), torch.randn(rows, 16))
        expected = gradients(model, batch)
        lowtide.profile(model, batch, loss=planned_for).plan("200%", planner="none").apply(model)
        assert all(map(torch.equal, expected, gradients(model, batch)))


def gradients(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Of the model's own loss alone."""
    model.zero_grad()
    model(*batch)["loss"].backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
