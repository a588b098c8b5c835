"""The bytes of DistributedDataParallel's buckets: counted in a plan, or noticed at the first step."""

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from nets import said
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import lowtide
from lowtide.planning.schedules import bucket_bytes, reserve, with_buckets
from lowtide.runtime.runner import runner_of
from lowtide.verification.measure_step import peak_above_start, static_bytes, train_step

pytestmark = pytest.mark.slow

WIDTH, ROWS = 64, 256


@pytest.fixture(autouse=True)
def group(tmp_path: Any) -> Iterator[None]:
    """A process group of this process alone: DistributedDataParallel has buckets all the same."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def net() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def own_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def test_a_step_with_buckets_holds_them_throughout() -> None:
    step = lowtide.profile(net(), torch.randn(ROWS, WIDTH)).step
    beside = with_buckets(step, bucket_bytes=1000, gradients_in_buckets=False)
    instead = with_buckets(step, bucket_bytes=1000, gradients_in_buckets=True)
    assert with_buckets(step, bucket_bytes=0, gradients_in_buckets=True) is step
    assert beside.static_bytes == instead.static_bytes == step.static_bytes + 1000
    assert (bucket_bytes(step), reserve(step).gradients_in_buckets) == (0, False)
    assert (reserve(beside).bucket_bytes, reserve(beside).gradients_in_buckets) == (1000, False)
    assert (reserve(instead).bucket_bytes, reserve(instead).gradients_in_buckets) == (1000, True)


def test_buckets_that_hold_gradients_are_cheaper_than_those_beside_them() -> None:
    x = torch.randn(4, WIDTH)  # so small that gradients are most of the peak
    beside, instead = net(), net()
    plain = lowtide.profile(net(), x).peak_bytes
    assert lowtide.profile(DDP(beside), x).peak_bytes == plain + own_bytes(beside)
    views = lowtide.profile(DDP(instead, gradient_as_bucket_view=True), x)
    assert views.peak_bytes < plain + own_bytes(instead) / 2


@pytest.mark.parametrize("views", [False, True])
def test_buckets_that_come_later_are_noticed_and_the_budget_is_kept(
    views: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lowtide")
    torch.manual_seed(0)
    model, x = net(), torch.randn(ROWS, WIDTH)
    profile = lowtide.profile(model, x)
    budget = profile.floor_bytes + own_bytes(model) + 1024
    plan = profile.plan(budget)
    assert plan.peak_bytes + own_bytes(model) > budget
    plan.apply(model)
    wrapper = DDP(model, gradient_as_bucket_view=views)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        train_step(wrapper, x)
    above = peak_above_start(partial(train_step, wrapper, x))
    assert static_bytes(model, x, optimizer) + own_bytes(model) + above <= budget
    words = "DistributedDataParallel's buckets of gradients take 65.0 KiB (66560 bytes) more than the plan"
    assert sum(line.startswith(words) for line in said(caplog)) == 1
    runner = runner_of(wrapper)
    assert runner is not None and runner is runner_of(model)
    assert lowtide.remove(wrapper) is wrapper
    assert runner_of(model) is None


def test_mixed_precision_of_the_wrapper_is_refused() -> None:
    wrapper = DDP(net())
    wrapper.mixed_precision = "anything"
    with pytest.raises(lowtide.LowtideError, match=r"use torch\.autocast instead"):
        lowtide.checkpoint(wrapper, torch.randn(ROWS, WIDTH), budget="90%")
