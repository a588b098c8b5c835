"""Steps whose graphs run several times: the step of one graph alone."""

import pytest
import torch
from torch import Tensor, nn

import lowtide

pytestmark = pytest.mark.slow


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(16, 64), nn.Linear(16, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.one(x)), torch.tanh(self.other(x))


def test_two_values_of_another_graph_may_share_a_storage() -> None:
    """The gradients of both outputs are one expanded number, where the loss is their sum."""
    model = TwoOutputs()
    found = lowtide.profile(model, torch.randn(32, 16, requires_grad=True), calls=2)
    assert found.plan(found.floor_bytes).peak_bytes <= found.floor_bytes <= found.peak_bytes
