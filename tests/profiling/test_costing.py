"""A captured step with its costs, measured or scaled from known ones."""

import operator

import pytest
import torch
from fake_calls import fake
from torch import nn

from lowtide.analyze.captured_step import capture
from lowtide.api import profile
from lowtide.ops.calls import Call, OpCost, signature
from lowtide.ops.random_ops import apply_mask
from lowtide.profiling import costing, op_trials
from lowtide.profiling import work as work_module
from lowtide.profiling.costing import KnownCosts, estimate_costs, measure_costs
from lowtide.profiling.devices import OpTiming
from lowtide.profiling.work import Work, work_making, work_of
from lowtide.verification.measure_step import measure_here
from lowtide.zoo.targets import Target


@pytest.mark.busy
@pytest.mark.parametrize(("interruptions", "num_notes"), [(0, 0), (3, 1)])
def test_a_busy_machine_is_noted_in_the_profile_and_its_plans(interruptions, num_notes, monkeypatch):
    monkeypatch.setattr(op_trials, "timed", lambda call, device: OpTiming(1e-3, interruptions))
    monkeypatch.setattr(op_trials, "rest_after", lambda timing: None)
    found = profile(nn.Linear(8, 8), torch.randn(4, 8), cache=False)
    told = [note for note in found.step.notes if "too busy to time" in note]
    assert len(told) == num_notes
    assert [note for note in found.plan("200%").solution.notes if "too busy" in note] == told


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


aten = torch.ops.aten


def test_a_call_of_another_batch_is_scaled_from_the_same_layer():
    def product(rows, inner):
        return Call(torch.ops.aten.mm.default, (torch.empty(rows, inner), torch.empty(inner, 16)))

    measured = [
        (product(8, 16), OpCost(1.0, 0, False), (512,)),
        (product(8, 64), OpCost(7.0, 0, False), (512,)),
    ]
    # by bytes alone, it would be the other one
    asked = product(80, 16)
    assert KnownCosts(measured).cost_of(asked, signature(asked), (5120,)).seconds == pytest.approx(10.0)


def test_scaled_cost_takes_the_nearest_of_the_same_op():
    def mm(rows):
        return Call(aten.mm.default, (fake(rows, 64), fake(64, 64)))

    known = KnownCosts(
        [
            (mm(8), OpCost(1.0, 100, False), (8 * 64 * 4,)),
            (mm(1024), OpCost(64.0, 4000, False, (0, 8000)), (1024 * 64 * 4,)),
            (Call(aten.relu.default, (fake(512, 64),)), OpCost(1e6, 0, False), (512 * 64 * 4,)),
        ]
    )
    cost = known.cost_of(mm(512), signature(mm(512)), (512 * 64 * 4,))
    assert cost.estimated
    assert cost.seconds == 32.0
    assert cost.workspace_bytes == 4000, "a smaller call may need as much"
    assert cost.hidden_bytes == (0, pytest.approx(4121, abs=1))
    assert known.cost_of(mm(2048), signature(mm(2048)), (2048 * 64 * 4,)).workspace_bytes > 7500
    assert known.cost_of(mm(8), signature(mm(8)), ()) == OpCost(1.0, 100, False)
    sine = Call(aten.sin.default, (fake(8),))
    assert known.cost_of(sine, signature(sine), (32,)).estimated


def test_only_what_has_flops_is_run_on_fake_tensors_and_once(monkeypatch):
    found = []
    monkeypatch.setattr(work_module, "_work_of", lambda call: found.append(call) or Work(8, 8, (8,)))
    monkeypatch.setattr(work_module, "_KNOWN", {})

    def masked(rows):
        return Call(apply_mask, (fake(rows), torch.empty(rows, dtype=torch.bool), 0.1))

    def product(rows):
        return Call(aten.mm.default, (fake(rows, 64), fake(64, 64)))

    for make, num_runs in ((masked, 0), (product, 5)):
        known = KnownCosts((make(rows), OpCost(1.0, 0, False), (4 * rows,)) for rows in (16, 32))
        for _ in range(2):
            for rows in (8, 64, 128):
                cost = known.cost_of(make(rows), signature(make(rows)), (4 * rows,))
                assert cost.estimated
        assert len(found) == num_runs
    item = Call(operator.getitem, ([fake(3), fake(3)], 0))
    assert known.cost_of(item, signature(item), ()) == OpCost(0.0, 0, False)


def test_the_work_of_a_call_is_the_same_from_the_blocks_that_it_makes():
    call = Call(aten.relu.default, (fake(512, 64),))
    assert work_making(call, (512 * 64 * 4,)) == work_of(call)


@pytest.mark.parametrize("mode", ["ops", "run"])
@pytest.mark.parametrize("rows", [256, 2048])
def test_the_copies_of_masks_are_not_eagers(rows, mode):
    """Eager's mask has the dtype of its value: no peak of the baseline has a copy of a mask."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))
    batch, optimizer = torch.randn(rows, 32), torch.optim.AdamW(model.parameters())
    found = profile(model, batch, optimizer=optimizer, loss=_squares, mode=mode)
    measured = measure_here(Target("dropout", model, batch, optimizer, _squares))
    assert found.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)


def _squares(output):
    return output.square().mean()
