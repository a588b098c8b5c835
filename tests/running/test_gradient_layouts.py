"""Gradients that come in another order in memory than the output they belong to."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide.capture.gradient_layouts import in_another_order

pytestmark = pytest.mark.slow

SIZE = 15
LABELS = torch.zeros(5, SIZE, SIZE, dtype=torch.long)
WORDS = "arrives with its dimensions in another order in memory than the output has"


class Dense(nn.Module):
    """Returns an image, in the order that its convolutions give, or its loss."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 7, 3), nn.BatchNorm2d(7)]
        self.layers = nn.Sequential(*layers)
        self.returns = returns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.layers(x)
        if self.returns == "contiguous":
            return scores.contiguous()
        return F.cross_entropy(scores, LABELS) if self.returns == "loss" else scores


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = model(x)
    return output if output.dim() == 0 else F.cross_entropy(output, LABELS)


@pytest.mark.parametrize("is_given", [True, False])
def test_it_is_told_once(is_given: bool, caplog: pytest.LogCaptureFixture) -> None:
    model, x = Dense("image").to(memory_format=torch.channels_last), torch.randn(5, 3, 19, 19)
    x = x.contiguous(memory_format=torch.channels_last)
    with caplog.at_level(logging.WARNING, "lowtide"):
        loss = (lambda output: F.cross_entropy(output, LABELS)) if is_given else None
        lowtide.profile(model, x, loss=loss).plan("300%", planner="none").apply(model)
        assert caplog.text.count(WORDS) == is_given, "before training, where it can be known"
        for _ in range(2):
            loss_of(model, x).backward()
    assert caplog.text.count(WORDS) == 1


@pytest.mark.parametrize("returns", ["contiguous", "loss"])
def test_what_is_advised_is_exact(returns: str, caplog: pytest.LogCaptureFixture) -> None:
    model, x = Dense(returns).to(memory_format=torch.channels_last), torch.randn(5, 3, 19, 19)
    x = x.contiguous(memory_format=torch.channels_last)
    eager = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING, "lowtide"):
        lowtide.profile(model, x).plan("300%", planner="none").apply(model)
        for each in (eager, model):
            loss_of(each, x).backward()
    assert WORDS not in caplog.text
    for one, other in zip(eager.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_orders() -> None:
    assert in_another_order((4, 5), (5, 1), (1, 4))
    assert not in_another_order((4, 5), (5, 1), (0, 0)), "expanded"
    assert not in_another_order((4, 5), (5, 1), (10, 2)), "a part of something larger"
    assert not in_another_order((1, 5), (5, 1), (1, 7)), "one row has no order"
