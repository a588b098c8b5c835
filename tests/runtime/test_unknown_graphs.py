"""A graph that the plan does not know: the log and the error say the true cause."""

import logging

import pytest
import torch
from torch import nn

import lowtide

pytestmark = pytest.mark.slow


class Switched(nn.Module):
    """Takes another path where `flag` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))
        self.flag = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(x)
        return (hidden.sigmoid() if self.flag else hidden).sum()


class Broken(Switched):
    """Two graphs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[:1](x)
        torch._dynamo.graph_break()
        return super().forward(hidden)


def planned(model: nn.Module) -> nn.Module:
    return lowtide.checkpoint(model, torch.randn(8, 16), budget="1GB")


def test_a_new_shape_is_called_so(caplog: pytest.LogCaptureFixture) -> None:
    model = planned(Switched())
    with caplog.at_level(logging.INFO, "lowtide"):
        model(torch.randn(5, 16)).backward()
    assert "its input input_0 float32[5x16] was planned as input_0 float32[8x16]" in caplog.text


@pytest.mark.parametrize("change", ["path", "autocast"])
def test_another_graph_for_the_same_batch_is_no_new_shape(
    change: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = planned(Switched())
    model.flag = change == "path"
    with (
        caplog.at_level(logging.INFO, "lowtide"),
        torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast"),
    ):
        model(torch.randn(8, 16)).backward()
    assert "its inputs are as planned" in caplog.text and "was planned as" not in caplog.text


@pytest.mark.parametrize(("rows", "cause"), [(5, "was planned as"), (8, "its inputs are as planned")])
def test_a_new_graph_of_several_is_told_with_the_cause(
    rows: int, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = planned(Broken())
    model.flag = rows == 8
    with caplog.at_level(logging.INFO, "lowtide"):
        model(torch.randn(rows, 16)).backward()
    assert cause in caplog.text and "is planned: " in caplog.text
