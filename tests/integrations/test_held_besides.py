"""What a trainer's process holds besides a step is said, and messages advise what a trainer's user can do."""

import copy
import logging

import pytest
import torch
from torch import nn

import lowtide
from lowtide.integrations.held_besides import Besides, held_besides, loop_is_of, tell_of
from lowtide.runtime.loop_messages import PROFILER_IS_ON, SCRIPT, TRAINER
from lowtide.runtime.runner import runner_of


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))


@pytest.fixture(scope="module")
def plan(model: nn.Module) -> lowtide.Plan:
    return lowtide.profile(model, torch.randn(256, 32)).plan("100%")


def test_a_second_model_is_found_and_the_step_itself_is_not(model: nn.Module) -> None:
    batch, optimizer = torch.randn(256, 32), torch.optim.Adam(model.parameters())
    model(batch).sum().backward()
    optimizer.step()
    before = held_besides(model, batch, [optimizer])
    reference = nn.Linear(333, 777)
    found = held_besides(model, batch, [optimizer])
    own_bytes = reference.weight.nbytes + reference.bias.nbytes
    assert found.nbytes - before.nbytes == own_bytes
    assert "float32[777x333]" in found.largest or len(before.largest) == 3
    shared = reference.weight[:5]
    assert held_besides(model, batch, [optimizer]).nbytes == found.nbytes, "a view takes no bytes"
    del shared
    model.zero_grad()


def test_the_next_batch_counts_once_and_a_data_set_does_not(
    model: nn.Module, plan: lowtide.Plan, caplog: pytest.LogCaptureFixture
) -> None:
    batch = torch.randn(257, 31)
    assert held_besides(model, batch, []).next_batch_bytes == 0
    ready, rest = torch.randn(257, 31), [torch.randn(257, 31), torch.randn(31)]
    found = held_besides(model, batch, [])
    assert found.next_batch_bytes == ready.nbytes
    assert found.counted_bytes(0, "8GiB") == ready.nbytes and found.counted_bytes(7, "8GiB") == 7
    assert found.counted_bytes(0, "auto") == 0
    assert rest[0].shape == ready.shape, "one batch is ready, and the others are data"
    caplog.set_level(logging.INFO, "lowtide")
    tell_of(plan, Besides(plan.budget_bytes, (), on_cpu=True, next_batch_bytes=plan.budget_bytes), 0)
    assert not caplog.records, "all of it is counted"


def test_it_is_said_with_the_keyword_to_paste(plan: lowtide.Plan, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lowtide")
    nbytes = plan.budget_bytes // 2
    tell_of(plan, Besides(nbytes, ("float32[8x8]",), on_cpu=True), 0)
    (line,) = [record.getMessage() for record in caplog.records if "besides" in record.getMessage()]
    assert f"reserve={nbytes}" in line and "float32[8x8]" in line
    caplog.clear()
    tell_of(plan, Besides(plan.budget_bytes // 200, (), on_cpu=True), 0)
    tell_of(plan, Besides(nbytes, (), on_cpu=True), nbytes)
    assert not [record for record in caplog.records if "besides" in record.getMessage()]


def test_on_an_accelerator_it_counts() -> None:
    there, here = Besides(100, (), on_cpu=False), Besides(100, (), on_cpu=True)
    assert there.counted_bytes(0, "8GiB") == 100 and there.counted_bytes(7, "8GiB") == 7
    assert there.counted_bytes(0, "auto") == 0, "what a device has free is without it"
    assert here.counted_bytes(0, "8GiB") == 0


def test_who_cannot_pass_a_loss_is_never_told_to(
    model: nn.Module, plan: lowtide.Plan, caplog: pytest.LogCaptureFixture
) -> None:
    for owner, word in ((None, ""), (TRAINER, "reserve="), (SCRIPT, "--reserve")):
        planned = copy.deepcopy(model)
        plan.apply(planned)
        if owner is not None:
            loop_is_of(owner, planned)
        caplog.clear()
        runner_of(planned).observer.say(PROFILER_IS_ON)
        (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert ("loss=" in record.getMessage()) is (owner is None)
        assert record.getMessage().endswith(word)
