"""A captured step with its costs: what is said of a machine that was too busy to time."""

import pytest
import torch
from torch import nn

from lowtide.api import profile
from lowtide.profiling import trials
from lowtide.profiling.device import OpTiming


@pytest.mark.busy
@pytest.mark.parametrize(("interruptions", "num_notes"), [(0, 0), (3, 1)])
def test_a_busy_machine_is_noted_in_the_profile_and_its_plans(interruptions, num_notes, monkeypatch):
    monkeypatch.setattr(trials, "timed", lambda call, device: OpTiming(1e-3, interruptions))
    monkeypatch.setattr(trials, "rest_after", lambda timing: None)
    found = profile(nn.Linear(8, 8), torch.randn(4, 8), cache=False)
    told = [note for note in found.step.notes if "too busy to time" in note]
    assert len(told) == num_notes
    assert [note for note in found.plan("200%").solution.notes if "too busy" in note] == told
