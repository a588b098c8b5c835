"""What a device has free for a step, of which a part may be allocated already."""

import gc

import torch
from torch import nn

import lowtide
from lowtide.facts import auto_budget
from lowtide.profiling.free_memory import free_memory
from lowtide.trace.model_call import Loop


def test_tensors_of_the_step_that_exist_are_held(monkeypatch):
    monkeypatch.setattr(auto_budget, "resident_bytes", lambda: None)
    model = nn.Linear(64, 64)
    model.twin = model.weight  # shared memory counts once
    optimizer = torch.optim.Adam(model.parameters())
    batch = {"input": torch.randn(16, 64)}
    loop = Loop.of(optimizer, None, origins=[*model.parameters(), *batch.values()])
    weights, inputs = (64 * 64 + 64) * 4, 16 * 64 * 4

    def held() -> int:
        return free_memory("cpu", loop).held_bytes

    assert held() == weights + inputs
    model(**batch).sum().backward()
    assert held() == 2 * weights + inputs
    optimizer.step()
    assert held() == 4 * weights + inputs + 2 * 4, "two moments, and a counter for each parameter"
    optimizer.zero_grad()
    assert held() == 3 * weights + inputs + 2 * 4
    del batch
    assert held() == 3 * weights + 2 * 4
    del model, optimizer
    gc.collect()
    assert held() == 0
    assert free_memory("cpu", None).held_bytes == 0


def test_auto_plans_a_profile_with_what_is_free(monkeypatch, capsys):
    monkeypatch.setattr(auto_budget, "LEAST_RESERVE_BYTES", 0)
    monkeypatch.setattr(auto_budget, "resident_bytes", lambda: None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
    batch, optimizer = torch.randn(256, 64), torch.optim.SGD(model.parameters(), 0.1)
    profile = lowtide.profile(model, batch, optimizer=optimizer)
    held = sum(tensor.nbytes for tensor in (batch, *model.parameters()))
    share = 0.5 * (profile.floor_bytes + profile.peak_bytes)
    free = int(share) * 10 // 9 - held
    monkeypatch.setattr(auto_budget, "host_bytes", lambda: free)
    plan = profile.plan("auto")
    assert abs(plan.budget_bytes - share) < 3
    assert plan.recompute_seconds > 0 and plan.peak_bytes <= plan.budget_bytes
    said = capsys.readouterr().err
    assert said.count("budget auto: ") == 1 and plan.solution.notes[-1] in said
    lowtide.checkpoint(model, batch, budget="auto", optimizer=optimizer)
    applied = lowtide.plan_of(model)
    assert applied.budget_bytes == plan.budget_bytes and applied.solution.notes[-1] == plan.solution.notes[-1]
    said = capsys.readouterr().err
    assert said.count("budget auto: ") == said.count("predicted peak") == 1
