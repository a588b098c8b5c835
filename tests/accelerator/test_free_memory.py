"""The budget `auto` on an accelerator: the same before and after a step's tensors are made."""

import gc
from types import ModuleType

import torch
from accelerator_cases import CASES, on

import lowtide
from lowtide.planning.allocator import SMALL_SEGMENT_BYTES
from lowtide.profiles import auto_budget_of
from lowtide.trace.model_call import call, loss_of

MIB = 1 << 20


def test_auto_is_what_the_device_has(standin: ModuleType, device: torch.device) -> None:
    target = on(CASES["mlp"](), device)
    assert target.optimizer is not None
    found = lowtide.profile(target.model, target.batch, optimizer=target.optimizer, loss=target.loss)
    gc.collect()
    torch.accelerator.empty_cache()
    standin.set_capacity(torch.accelerator.memory_reserved(device) + 600 * MIB, device)
    before = auto_budget_of(found).nbytes
    loss_of(call(target.model, target.batch), target.loss).backward()
    target.optimizer.step()
    after = auto_budget_of(found).nbytes
    held = torch.accelerator.memory_allocated(device)
    assert held > 0 and abs(after - before) <= SMALL_SEGMENT_BYTES, "cached blocks and the optimizer's state"
    assert 88 * MIB <= before <= 88 * MIB + torch.accelerator.memory_reserved(device)
    target.optimizer.zero_grad()
    plan = found.plan("auto")
    assert plan.budget_bytes <= after and f"free on {device}" in plan.solution.notes[-1]
    reserved = found.plan("auto reserved")
    assert reserved.reserved_budget_bytes is not None
    assert abs(reserved.reserved_budget_bytes - plan.budget_bytes) <= SMALL_SEGMENT_BYTES


def test_the_peak_since_the_last_reading_is_that_of_torchs_counter(device: torch.device) -> None:
    target = on(CASES["mlp"](), device)
    lowtide.peak_bytes(target.model)
    block = torch.empty(32 * MIB, dtype=torch.uint8, device=device)
    live = torch.accelerator.memory_allocated(device)
    del block
    assert lowtide.peak_bytes(target.model) == live
    assert lowtide.peak_bytes(target.model) == torch.accelerator.memory_allocated(device) <= live - 32 * MIB
