"""What a loop makes for every step beside the model counts: labels, the last loss, gradients of before."""

import gc
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from nets import said
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide.runtime.loop_messages import TRAINER, LoopOwner
from lowtide.runtime.loop_tensors import LoopTensors
from lowtide.runtime.runner import runner_of
from lowtide.verification.measure_step import peak_above_start, static_bytes

pytestmark = pytest.mark.slow

WIDTH, ROWS, STEPS = 64, 512, 3
Loop = Callable[[nn.Module, torch.optim.Optimizer], None]


def labels(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(STEPS):
        values, wanted = torch.randn(2, ROWS, WIDTH).clone().unbind()
        wanted = wanted.clone()
        F.smooth_l1_loss(model(values), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()


def last_loss(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The number of a mean squared error lives in a block as large as its input."""
    for _ in range(STEPS):
        values, wanted = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
        loss = F.mse_loss(model(values), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def late_zero_grad(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As torchvision's reference does."""
    for _ in range(STEPS):
        output = model(torch.randn(ROWS, WIDTH))
        loss = output.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def micro_batches(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(STEPS):
        for _ in range(2):
            model(torch.randn(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


@pytest.fixture(scope="module")
def plan() -> lowtide.Plan:
    model, optimizer = made()
    found = lowtide.profile(model, torch.randn(ROWS, WIDTH), optimizer=optimizer)
    return found.plan((found.floor_bytes + found.peak_bytes) // 2)


def peak_of(loop: Loop, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    torch.manual_seed(1)
    loop(model, optimizer)
    optimizer.zero_grad()
    return static_bytes(model, (), optimizer) + peak_above_start(lambda: loop(model, optimizer))


@pytest.mark.sample(2)
@pytest.mark.parametrize("loop", [labels, last_loss, late_zero_grad, micro_batches])
def test_the_budget_is_kept_and_nothing_need_be_said(
    loop: Loop, plan: lowtide.Plan, caplog: pytest.LogCaptureFixture
) -> None:
    (plain, its), (planned, own) = made(), made()
    plan.apply(planned)
    assert peak_of(loop, plain, its) > plan.budget_bytes
    assert peak_of(loop, planned, own) <= plan.budget_bytes
    assert all(map(torch.equal, plain.parameters(), planned.parameters()))
    assert not [line for line in said(caplog) if "the loop made" not in line]


def test_a_loss_counts_through_the_backward_pass() -> None:
    def wide() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH))
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(STEPS):
            values, wanted = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
            output = model(values)
            loss = F.mse_loss(output, wanted)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = wide()
    found = lowtide.profile(model, torch.randn(ROWS, WIDTH), optimizer=optimizer)
    eager = found.plan(found.peak_bytes)
    room_bytes = 5 * ROWS * WIDTH  # for the labels alone, not for the loss
    tight = replace(eager, solution=replace(eager.solution, budget_bytes=eager.peak_bytes + room_bytes))
    tight.apply(model)
    assert peak_of(loop, model, optimizer) <= tight.budget_bytes


def test_bytes_that_cannot_fit_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = made()
    lowtide.checkpoint(model, torch.randn(ROWS, WIDTH), optimizer=optimizer, budget=_floor())
    micro_batches(model, optimizer)
    assert any("that it stays within the budget of" in line for line in said(caplog))


@pytest.mark.parametrize(("owner", "advice"), [(None, "Give `loss=`"), (TRAINER, "give Lowtide a reserve=")])
def test_tensors_of_the_loop_are_told_with_what_its_owner_can_do(
    owner: LoopOwner | None, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = made()

    def loss(output: torch.Tensor) -> torch.Tensor:
        return F.smooth_l1_loss(output, torch.zeros_like(output))

    found = lowtide.profile(model, torch.randn(ROWS, WIDTH), optimizer=optimizer, loss=loss)
    found.plan(found.floor_bytes).apply(model)
    runner = runner_of(model)
    assert runner is not None
    runner.schedules.loop_owner = owner
    last_loss(model, optimizer)
    (words,) = [
        line for line in said(caplog) if "of its own tensors live" in line and "planned again" in line
    ]
    assert advice in words and ("loss=" in words) == (owner is None)


def test_what_stays_is_no_part_of_a_step() -> None:
    loop = LoopTensors(tuple, torch.device("cpu"))
    data, labels, late = torch.zeros(100), torch.zeros(70), torch.zeros(30)
    loop.call_begins((), (), loss_bytes=0)
    del late
    loop.backward_begins()
    del labels
    found = loop.call_begins((), (), loss_bytes=8)
    assert data.numel() and found == (280, 128, 0, True)


def test_labels_of_the_batch_that_was_planned_are_replaced_in_the_next_step() -> None:
    rows = 53
    data, labels, planned_on = torch.zeros(7, 5), torch.zeros(rows, 2), torch.zeros(rows, 9)
    batch = torch.zeros(rows, 3)
    gc.collect()  # they are old, as they are after planning
    loop = LoopTensors(tuple, torch.device("cpu"))
    first = loop.call_begins((batch,), (), loss_bytes=0)
    assert first == (labels.nbytes + planned_on.nbytes, 0, batch.nbytes, False)
    loop.backward_begins()
    del planned_on
    labels = torch.ones(rows, 2)
    second = loop.call_begins((batch,), (), loss_bytes=8)
    assert data.numel() and second == (labels.nbytes, 8, batch.nbytes, True)


def test_a_loop_may_plan_at_its_first_batch(plan: lowtide.Plan) -> None:
    model, optimizer = made()
    for number in range(2):
        values, wanted = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
        gc.collect()
        if not number:
            plan.apply(model)
        F.smooth_l1_loss(model(values), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
    del values, wanted
    assert peak_of(labels, model, optimizer) <= plan.budget_bytes


def test_a_data_set_costs_the_first_step_alone(plan: lowtide.Plan) -> None:
    model, optimizer = made()
    plan.apply(model)
    own = {graph.fingerprint: (graph,) for graph in plan.solution.graphs if graph.in_model}
    graphs = []
    data = torch.randn(ROWS, 4 * WIDTH)
    for values in data.split(WIDTH, dim=1)[:3]:
        model(values.clone()).mean().backward()
        graphs.append(runner_of(model).schedules.graphs)
        optimizer.step()
        optimizer.zero_grad()
    assert graphs[0] != own and graphs[2] == own


def _floor() -> int:
    model, optimizer = made()
    return lowtide.profile(model, torch.randn(ROWS, WIDTH), optimizer=optimizer).floor_bytes
