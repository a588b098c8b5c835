"""Bytes that the accelerator's allocator reserves: predicted, measured, and as a budget."""

import gc

import pytest
import torch
from accelerator_cases import CASES, on

import lowtide
from lowtide.planning.allocator import SMALL_SEGMENT_BYTES
from lowtide.trace.model_call import call, loss_of
from lowtide.zoo.targets import Target


def _reserved(target: Target, steps: int = 3) -> int:
    """What the allocator reserves for training from an empty cache."""
    device = next(target.model.parameters()).device
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(device)
    assert target.optimizer is not None
    for _ in range(steps):
        loss_of(call(target.model, target.batch), target.loss).backward()
        target.optimizer.step()
        target.optimizer.zero_grad()
    return torch.accelerator.max_memory_reserved(device)


def _profile(target: Target) -> lowtide.Profile:
    return lowtide.profile(target.model, target.batch, optimizer=target.optimizer, loss=target.loss)


@pytest.mark.parametrize("name", ["cnn", "mlp", pytest.param("encoder", marks=pytest.mark.long)])
def test_reserved_bytes_are_predicted(name: str, device: torch.device) -> None:
    target = on(CASES[name](), device)
    found = _profile(target)
    plan = found.plan("60%")
    reserved = plan.solution.reserved
    assert reserved is not None and plan.peak_bytes <= reserved.least_bytes <= reserved.most_bytes
    plan.apply(target.model)
    measured = _reserved(target)
    assert reserved.least_bytes - SMALL_SEGMENT_BYTES <= measured <= reserved.most_bytes


@pytest.mark.parametrize("name", ["cnn", "mlp"])
def test_a_budget_of_reserved_bytes(name: str, device: torch.device) -> None:
    target = on(CASES[name](), device)
    found = _profile(target)
    plan = found.plan("70% reserved")
    budget_bytes = plan.reserved_budget_bytes
    assert budget_bytes is not None and plan.solution.reserved is not None
    assert plan.solution.reserved.budget_bytes == budget_bytes >= plan.solution.reserved.least_bytes
    assert "reserved" in repr(plan) and "reserved" in plan.summary()
    plan.apply(target.model)
    assert _reserved(target) <= budget_bytes


def test_a_device_of_that_capacity_is_enough(device: torch.device, standin) -> None:
    target = on(CASES["mlp"](), device)
    plan = _profile(target).plan("75% reserved")
    plan.apply(target.model)
    gc.collect()
    torch.accelerator.empty_cache()
    standin.set_capacity(plan.reserved_budget_bytes, device)
    _reserved(target)


def test_a_budget_of_reserved_bytes_that_no_plan_keeps(device: torch.device) -> None:
    found = _profile(on(CASES["mlp"](), device))
    with pytest.raises(
        lowtide.BudgetTooSmall, match="the least that a plan was found to reserve is"
    ) as error:
        found.plan("1MiB reserved")
    found.plan(f"{error.value.floor_bytes} reserved")


@pytest.mark.long
def test_both_are_verified(device: torch.device) -> None:
    target = on(CASES["mlp"](), device)
    plan = _profile(target).plan("80% reserved")
    found = lowtide.verify(
        target.model, target.batch, plan, optimizer=target.optimizer, loss=target.loss, timed_runs=0
    )
    assert found.exact and found.fits and found.measured_reserved_bytes is not None
    assert found.measured_peak_bytes <= found.measured_reserved_bytes <= plan.reserved_budget_bytes
    assert found.baseline_measured_reserved_bytes > found.measured_reserved_bytes
    assert "reserved by the allocator" in found.summary() and "reserved=" in repr(found)
