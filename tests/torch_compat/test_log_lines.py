"""A forward that logs is one graph, and its lines come in every call."""

import logging

import pytest
import torch
from torch import nn

import lowtide
from lowtide.runtime.runner import runner_of

pytestmark = pytest.mark.slow

logger = logging.getLogger("a-users-model")


class Logs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        logger.warning("%d rows", len(x))
        result: torch.Tensor = self.last(hidden.tanh())
        return result.square().mean()


def test_a_log_line_does_not_break_the_graph(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = Logs(), torch.randn(4, 8)
    lowtide.checkpoint(model, batch, budget="1GB")
    caplog.clear()
    for _ in range(3):
        model(batch).backward()
    runner = runner_of(model)
    assert runner is not None and len(runner.backend.graphs) == 1
    assert [record.getMessage() for record in caplog.records if record.name == logger.name] == ["4 rows"] * 3
