"""Models whose values decide how many layers run: a longer path than the planned one is told, not refused."""

import copy

import pytest
import torch
from nets import said
from torch import nn
from torch.nn import functional as F

import lowtide

pytestmark = pytest.mark.slow

WIDTH, ROWS = 32, 256


class Layers(nn.Module):
    """Runs the first two of its layers, or all. It `breaks`: each in a graph of its own."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.register_buffer("zero", torch.zeros(1))
        self.runs, self.breaks = (True, True, False, False, False), breaks

    @torch._dynamo.disable
    def decided(self, number: int) -> bool:
        """Runs between two graphs, as Python's random numbers do."""
        return self.runs[number]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if self.decided(number) if self.breaks else self.runs[number]:
                x = F.gelu(layer(x))
        return x.square().mean()


@pytest.mark.sample(1)
@pytest.mark.parametrize("breaks", [False, True])
def test_a_longer_path_is_told(breaks: bool, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    planned, batch = Layers(breaks=breaks), torch.randn(ROWS, WIDTH)
    plain = copy.deepcopy(planned)
    found = lowtide.profile(planned, batch)
    found.plan(found.floor_bytes).apply(planned)
    for step in range(3):
        for model in (plain, planned):
            if step:
                model.runs = (True,) * 5
                model.zero.requires_grad_()  # as some codebooks do in training
            model.zero_grad()
            model(batch).backward()
        gradients = ([p.grad for p in model.parameters() if p.grad is not None] for model in (plain, planned))
        assert all(map(torch.equal, *gradients))
    assert any("that it stays within the budget" in line for line in said(caplog))
    assert any("values decide which graphs" in line for line in said(caplog)) == breaks
