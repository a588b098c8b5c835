"""The same traced graphs in a loop with other settings: the step of a new capture, without a trace."""

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

from lowtide.analyze.analyze_again import StepSettings
from lowtide.analyze.captured_step import capture
from lowtide.trace import trace_model


class Labelled(nn.Module):
    """Returns a loss and its logits, as many libraries' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x, y):
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}


def make_loop():
    model = Labelled()
    batch = (torch.randn(6, 8), torch.randint(4, (6,)))
    return model, batch, torch.optim.Adam(model.parameters())


@pytest.mark.parametrize(
    "change",
    [
        {"step_in_backward": True},
        {"holds_outputs": False},
        {"offload_what": ("activations",)},
        {"accumulate": True},
        {"reserve_bytes": 1000},
    ],
    ids=str,
)
def test_the_step_is_that_of_a_new_capture(change, monkeypatch):
    model, batch, optimizer = make_loop()
    expected = capture(model, batch, optimizer=optimizer, **change)
    captured = capture(model, batch, optimizer=optimizer)
    assert captured.step != expected.step
    monkeypatch.setattr(trace_model, "trace", lambda *_, **__: pytest.fail("traced again"))
    again = captured.again(replace(StepSettings(), **change))
    assert again.step == expected.step
    assert captured.again(StepSettings()).step == captured.step


def test_a_capture_keeps_nothing_of_the_user_alive():
    model, batch, optimizer = make_loop()
    captured = capture(model, batch, optimizer=optimizer)
    assert captured.again.optimizers == [optimizer]
    del batch
    gc.collect()
    assert captured.again(StepSettings()) is None
