"""Autocast on the accelerator: exact in bfloat16, in float16 and without, in one model; within the budget."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from accelerator_cases import CASES, FIGURES, as_target, check, different, on, trained
from torch import Tensor, nn
from torch.nn import functional
from training import twin

import lowtide
from lowtide.zoo.targets import Target

HALF = [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)]


def autocast(device: torch.device, dtype: torch.dtype | None) -> Callable[[], AbstractContextManager[Any]]:
    return partial(torch.autocast, device.type, dtype) if dtype is not None else nullcontext


def layers(loss: Callable[[Tensor], Tensor], count: int = 4) -> Target:
    model = nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(128, 128), nn.GELU())))
    return as_target(model, torch.randn(1024, 128), loss=loss)


@pytest.mark.parametrize("dtype", HALF)
def test_an_encoder_is_exact_and_within_the_budget(dtype: torch.dtype, device: torch.device) -> None:
    check(replace(CASES["encoder"](), within=autocast(device, dtype)), device, share=0.7)


def squared(output: Tensor) -> Tensor:
    return functional.mse_loss(output, torch.zeros_like(output))


def smooth(output: Tensor) -> Tensor:
    return functional.smooth_l1_loss(output, torch.ones_like(output))


def divergence(output: Tensor) -> Tensor:
    return functional.kl_div(output, torch.ones_like(output), reduction="batchmean")


@pytest.mark.parametrize("loss", [squared, smooth, divergence])
def test_a_loss_keeps_the_values_that_autocast_casts_for_it(
    loss: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    """The caller has the arguments of a call until the call returns, beside their casts."""
    target = replace(layers(loss), within=autocast(device, torch.float16))
    check(target, device, share=0.85)
    predicted, measured, _ = FIGURES[-1]
    assert 0 <= predicted - measured <= 4096


def test_one_model_in_several_precisions(device: torch.device) -> None:
    eager = on(layers(squared), device)
    planned = twin(eager)
    budget = int(trained(twin(eager)).peak_bytes * 0.95)
    with torch.autocast(device.type, torch.float16):
        lowtide.checkpoint(
            planned.model, planned.batch, budget=budget, optimizer=planned.optimizer, loss=planned.loss
        )
    for number, dtype in enumerate((torch.float16, torch.bfloat16, None) * 2):
        within = autocast(device, dtype)
        seen = trained(replace(planned, within=within), steps=2, seed=number)
        assert different(trained(replace(eager, within=within), steps=2, seed=number), seen) == []
        if number >= 3:  # the first call of a precision measures ops
            assert seen.peak_bytes <= budget


@pytest.mark.parametrize("scale", [2.0**10, 2.0**40], ids=["fits", "overflows"])
def test_a_gradient_scaler(scale: float, device: torch.device) -> None:
    """With a scale that overflows, the first steps are skipped."""
    eager = on(layers(squared), device)
    planned = twin(eager)
    with torch.autocast(device.type, torch.float16):
        profile = lowtide.profile(
            planned.model, planned.batch, optimizer=planned.optimizer, loss=planned.loss
        )
    plan = profile.plan("85%")
    plan.apply(planned.model)
    seen, peak_bytes = scaled(planned, device, scale)
    expected, _ = scaled(eager, device, scale)
    assert all(map(torch.equal, expected, seen))
    assert peak_bytes <= plan.budget_bytes


def scaled(target: Target, device: torch.device, scale: float) -> tuple[list[Tensor], int]:
    """Losses, scales and parameters of four steps with a scaler; the bytes that the steps use, with those of
    the model and the batch."""
    assert target.optimizer is not None
    scaler = torch.amp.GradScaler(device.type, init_scale=scale)
    own = [*target.model.parameters(), *target.batch]
    before = torch.accelerator.memory_allocated(device) - sum(-(-t.nbytes // 512) * 512 for t in own)
    torch.accelerator.reset_peak_memory_stats(device)
    found = []
    for _ in range(4):
        with torch.autocast(device.type, torch.float16):
            loss = target.loss(target.model(*target.batch))
        scaler.scale(loss).backward()
        scaler.step(target.optimizer)
        scaler.update()
        target.optimizer.zero_grad()
        found += [loss.detach().cpu(), torch.tensor(scaler.get_scale())]
        del loss
    peak_bytes = torch.accelerator.max_memory_allocated(device) - before
    return [*found, *(parameter.detach().cpu() for parameter in target.model.parameters())], peak_bytes
