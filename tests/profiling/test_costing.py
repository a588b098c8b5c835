"""A captured step with its costs: what is said of a busy machine, and blocks on a GPU."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from lowtide.analyze.captured_step import capture
from lowtide.api import profile
from lowtide.profiling import costing, op_trials
from lowtide.profiling.costing import estimate_costs, measure_costs
from lowtide.profiling.devices import OpTiming


@pytest.mark.busy
@pytest.mark.parametrize(("interruptions", "num_notes"), [(0, 0), (3, 1)])
def test_a_busy_machine_is_noted_in_the_profile_and_its_plans(interruptions, num_notes, monkeypatch):
    monkeypatch.setattr(op_trials, "timed", lambda call, device: OpTiming(1e-3, interruptions))
    monkeypatch.setattr(op_trials, "rest_after", lambda timing: None)
    found = profile(nn.Linear(8, 8), torch.randn(4, 8), cache=False)
    told = [note for note in found.step.notes if "too busy to time" in note]
    assert len(told) == num_notes
    assert [note for note in found.plan("200%").solution.notes if "too busy" in note] == told


def test_blocks_on_a_gpu_are_as_its_allocator_cuts_them():
    captured = capture(nn.Linear(8, 8), torch.randn(4, 8), loss=torch.sum)
    here, known = measure_costs(captured)
    there = estimate_costs(replace(captured, step=replace(captured.step, device="cuda:0")), known)
    assert any(storage.nbytes % 512 for storage in here.storages)
    assert not any(storage.nbytes % 512 for storage in there.storages)


def test_only_ops_with_tensors_of_other_types_are_measured_later(monkeypatch):
    """Kernels of another type hold other bytes inside, which no scaling tells."""

    def step_of(rows, dtype):
        return capture(nn.Linear(8, 8).to(dtype), torch.randn(rows, 8, dtype=dtype), loss=torch.sum)

    _, known = measure_costs(step_of(4, torch.float32))
    measured = []
    real = costing.measure_calls
    monkeypatch.setattr(
        costing, "measure_calls", lambda calls, **how: measured.extend(calls) or real(calls, **how)
    )
    for _ in range(2):
        estimate_costs(step_of(6, torch.float32), known)
        assert not measured
    estimate_costs(step_of(6, torch.bfloat16), known)
    assert any("addmm" in str(call.target) for call in measured)
    measured.clear()
    estimate_costs(step_of(4, torch.bfloat16), known)
    assert not measured
