"""Loops that let go of what the model returns: less to count, and a warning where it is not so."""

from typing import Any

import pytest
import torch
from nets import said
from torch import nn
from torch.nn import functional as F
from training import differences, measured_peak, train, twin

import lowtide
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow

ROWS, CLASSES = 64, 2000
LOGITS_BYTES = ROWS * CLASSES * 4


class Output(dict):
    """As transformers' models return."""

    @property
    def loss(self) -> torch.Tensor:
        return self["loss"]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.last(torch.tanh(self.first(x)))
        return Output(loss=F.cross_entropy(logits, labels), logits=logits)


def pair() -> tuple[Target, Target]:
    torch.manual_seed(0)
    model = Classifier()
    batch = {"x": torch.randn(ROWS, 16), "labels": torch.randint(0, CLASSES, (ROWS,))}
    target = Target("model", model, batch, torch.optim.SGD(model.parameters(), lr=0.1), holds_outputs=False)
    return target, twin(target)


def test_outputs_that_nobody_holds_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    plain, planned = pair()
    options = {"optimizer": planned.optimizer}
    held = lowtide.profile(planned.model, planned.batch, **options)
    found = lowtide.profile(planned.model, planned.batch, holds_outputs=False, **options)
    assert found.peak_bytes <= held.peak_bytes - 0.9 * LOGITS_BYTES
    assert found.floor_bytes < held.floor_bytes
    plan = found.plan(found.floor_bytes)
    plan.apply(planned.model)
    assert differences(train(plain), train(planned)) == []
    assert measured_peak(planned) <= plan.budget_bytes
    assert abs(measured_peak(plain) / plan.baseline_peak_bytes - 1) < 0.01
    assert said(caplog) == []


def test_a_loop_that_holds_them_all_the_same_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    _, planned = pair()
    found = lowtide.profile(planned.model, planned.batch, holds_outputs=False)
    found.plan(found.floor_bytes).apply(planned.model)
    for _ in range(3):
        output = planned.model(**planned.batch)
        output.loss.backward()
    (words,) = said(caplog)[:1]
    assert f"{LOGITS_BYTES} bytes" in words and "holds_outputs=True" in words
    assert sum("holds_outputs" in line for line in said(caplog)) == 1


def test_a_plan_in_a_file_says_so(tmp_path) -> None:
    _, planned = pair()
    found = lowtide.profile(planned.model, planned.batch, holds_outputs=False)
    found.save(tmp_path / "profile.json")
    plan = lowtide.load_profile(tmp_path / "profile.json").plan("90%")
    plan.save(tmp_path / "plan.json")
    assert not lowtide.load_plan(tmp_path / "plan.json").solution.holds_outputs
