"""Outputs without a gradient: what is left of the backward pass rounds as eager's does."""

import pytest
import torch
from budgets import between
from torch import nn
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
