"""Where gradients are summed in another order than in eager, the user is told before training."""

import copy
import logging

import pytest
import torch
from torch import nn

import lowtide

pytestmark = pytest.mark.slow

WIDTH = 32
WORDS = "several views of one value that it also uses itself"


class ReturnsViews(nn.Module):
    def __init__(self, *, copies: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.copies = copies

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.first(x).tanh()
        views = h[:16], h.t()
        if self.copies:
            views = views[0].clone(), views[1].clone()
        return views[0], self.second(h), self.third(h), views[1]


def everything(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.stack([output.pow(2).sum() for output in outputs]).sum()


def layers(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return everything(outputs[1:3])


@pytest.mark.parametrize(
    ("copies", "loss", "told"), [(False, everything, True), (True, everything, False), (False, layers, False)]
)
def test_views_of_one_value(caplog: pytest.LogCaptureFixture, copies: bool, loss, told: bool) -> None:
    torch.manual_seed(0)
    planned, batch = ReturnsViews(copies=copies), torch.randn(64, WIDTH)
    plain = copy.deepcopy(planned)
    with caplog.at_level(logging.WARNING, "lowtide"):
        lowtide.checkpoint(planned, batch, budget="100%", loss=loss)
    loss(planned(batch)).backward()
    loss(plain(batch)).backward()
    expected = [parameter.grad for parameter in plain.parameters()]
    found = [parameter.grad for parameter in planned.parameters()]
    planned.zero_grad()
    planned(batch)
    lines = [record.getMessage() for record in caplog.records if record.name == "lowtide"]
    assert [WORDS in line for line in lines if "too busy" not in line] == [True] * told
    assert told or all(map(torch.equal, found, expected))
