"""Batch shapes that come after the planned one: each gets a plan for the same budget."""

import copy
import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from synthetic import chain
from torch import nn
from training import measured_peak
from trouble import BatchNorms, SharedModule

import lowtide
from lowtide.api import profile
from lowtide.facts import Graph, Reserve, Step
from lowtide.plans import Plan
from lowtide.profiles import Profile
from lowtide.runtime import counted_loop, replan
from lowtide.runtime.incomplete_steps import growth
from lowtide.runtime.runner import runner_of
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow

WIDTH = 48
BATCH = 256


def stack() -> nn.Module:
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.abs().mean()


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, WIDTH)


def images(count: int) -> torch.Tensor:
    return torch.randn(count // 8 or 1, 6, 12, 12)


def _profiled(model: nn.Module, batch: torch.Tensor, *, adam: bool = False) -> tuple[Target, Profile]:
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters) if adam else torch.optim.SGD(parameters, lr=0.1)
    target = Target("model", model, batch, optimizer, loss)
    return target, profile(model, batch, optimizer=optimizer, loss=loss)


@pytest.fixture(scope="module")
def profiled() -> tuple[Target, Profile]:
    torch.manual_seed(0)
    return _profiled(stack(), rows(BATCH))


def _gradients(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor | None]:
    model.zero_grad()
    torch.manual_seed(3)
    loss(model(batch)).backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("adam", [pytest.param(False, marks=pytest.mark.long), True], ids=["sgd", "adam"])
@pytest.mark.parametrize(
    "make, batch",
    [(stack, rows), pytest.param(SharedModule, rows, marks=pytest.mark.long), (BatchNorms, images)],
)
def test_smaller_batches_stay_within_a_plan_at_the_floor(
    make: Callable[[], nn.Module],
    batch: Callable[[int], torch.Tensor],
    adam: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    target, found = _profiled(make(), batch(BATCH), adam=adam)
    plan = found.plan(found.floor_bytes)
    plan.apply(target.model)
    for count in (BATCH, BATCH - 8, BATCH * 4 // 5, BATCH // 2, 1):
        smaller = replace(target, batch=batch(count))
        assert measured_peak(smaller) <= plan.budget_bytes, count
        plain = lowtide.remove(copy.deepcopy(target.model))
        pairs = zip(_gradients(target.model, smaller.batch), _gradients(plain, smaller.batch), strict=True)
        assert all(torch.equal(planned, eager) for planned, eager in pairs), count
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name == "lowtide"]
    assert told == []


@pytest.fixture
def too_small(profiled: tuple[Target, Profile]) -> tuple[nn.Module, Plan]:
    """A plan whose budget no other batch shape can meet."""
    target, found = profiled
    plan = found.plan(found.floor_bytes)
    plan = replace(plan, solution=replace(plan.solution, budget_bytes=1000))
    return plan.apply(copy.deepcopy(target.model)), plan


def test_a_smaller_batch_that_cannot_be_proven_runs_with_one_warning(
    too_small: tuple[nn.Module, Plan], caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = too_small
    batch = rows(BATCH - 10)
    with caplog.at_level(logging.WARNING, logger="lowtide"):
        planned = _gradients(model, batch)
        _gradients(model, batch)
    (record,) = caplog.records
    assert record.name == "lowtide"
    assert "at most" in record.getMessage() and "the budget of 1000 bytes" in record.getMessage()
    pairs = zip(planned, _gradients(lowtide.remove(copy.deepcopy(model)), batch), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_larger_batch_that_does_not_fit_is_refused(too_small: tuple[nn.Module, Plan]) -> None:
    model, _ = too_small
    with pytest.raises(lowtide.BudgetTooSmall):
        model(rows(BATCH + 1))


def test_growth_is_that_of_the_batch_or_of_what_the_loss_reads() -> None:
    def graph(tangent_bytes: int) -> Graph:
        return Graph(fingerprint="", in_model=True, returned=(), missing=(), tangent_bytes=tangent_bytes)

    step: Step = replace(chain(length=3), graphs=(graph(30),))
    assert growth(step, like=graph(30), reserve=Reserve()) == 1
    assert growth(step, like=graph(60), reserve=Reserve(batch_bytes=10**9)) == 1
    assert growth(step, like=graph(20), reserve=Reserve(batch_bytes=10**9)) == 1.5
    assert growth(step, like=None, reserve=Reserve(batch_bytes=10**9)) == 1


def test_planned_graphs_are_bounded(
    monkeypatch: pytest.MonkeyPatch, profiled: tuple[Target, Profile], caplog: pytest.LogCaptureFixture
) -> None:
    """The plan's own graph stays; of those that came later, the last ones do, and the log says so."""
    for module in (counted_loop, replan):
        monkeypatch.setattr(module, "PLANNED_GRAPHS", 2)
    target, found = profiled
    plan = found.plan("100%")
    plan = replace(plan, solution=replace(plan.solution, eager=False))
    plan.apply(target.model)
    planned = runner_of(target.model).schedules
    with caplog.at_level(logging.INFO, logger="lowtide"):
        for count in (8, 9, 10, 11, BATCH):
            _gradients(target.model, rows(count))
    assert len(planned.later) == 2 and set(planned.graphs) == {graph.fingerprint for graph in planned.first}
    assert "more than 2 graphs" in caplog.text
    lowtide.remove(target.model)


def test_a_graph_of_the_plan_runs_by_the_last_schedule_that_was_found_for_it(
    profiled: tuple[Target, Profile],
) -> None:
    """The other graphs of a step that was planned later were planned with that schedule."""
    target, found = profiled
    plan = found.plan("100%")
    planned = replan.Replanner(plan, target.model)
    (graph,) = planned.first
    other = replace(graph, later_bytes=graph.later_bytes + 1)
    planned._remember((other,))
    assert planned._known(graph.fingerprint) == (other,)
