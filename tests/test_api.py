"""The public names, and the functions of the library's front door."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import lowtide


def test_every_public_name_is_completed_and_loads():
    for name in lowtide.__all__:
        assert name in dir(lowtide) and getattr(lowtide, name) is not None, name
    assert "remat" not in lowtide.__all__
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = lowtide.nothing


def test_names_are_completed_before_torch_is_loaded():
    code = "import sys, lowtide; sys.exit('checkpoint' not in dir(lowtide) or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def step():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
    )
    return model, torch.randn(256, 64), torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("fresh", [True, False])
def test_a_step_is_measured_without_and_with_its_plan(fresh, monkeypatch):
    model, batch, optimizer = step()
    if not fresh:
        model.unsent = lambda: None  # cannot be pickled
    plan = lowtide.profile(model, batch, optimizer=optimizer).plan("80%")
    plan.apply(model)
    before = [parameter.clone() for parameter in model.parameters()]
    baseline = lowtide.measure_step(model, batch, optimizer=optimizer)
    planned = lowtide.measure_step(model, batch, optimizer=optimizer, plan=plan)
    assert baseline.fresh_process is planned.fresh_process is fresh
    assert planned.peak_bytes <= plan.budget_bytes < baseline.peak_bytes
    assert lowtide.remove(model) is model
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_both_names_of_offload_are_taken_and_may_not_differ(tmp_path):
    model, batch, optimizer = step()
    folder = f"disk:{tmp_path}"
    for names in ({"offload": folder}, {"swap": folder}, {"offload": folder, "swap": folder}):
        profile = lowtide.profile(model, batch, optimizer=optimizer, **names)
        assert profile.step.transfer_speed.store == folder
    for call in (lowtide.profile, lambda *args, **names: lowtide.checkpoint(*args, budget="80%", **names)):
        with pytest.raises(lowtide.LowtideError, match="differ: swap is the earlier name of offload"):
            call(model, batch, optimizer=optimizer, offload=folder, swap="host")
