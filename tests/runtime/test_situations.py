"""Situations that come after planning: each gets a plan for the same budget, exact and within it."""

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training import differences, measured_peak, train, twin

import lowtide
from lowtide.planning.planner import Planner
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow

WIDTH = 32
BATCH = 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(x))


class Net(nn.Module):
    """Blocks between a batch norm and a dropout. `reads`: where its code reads a value of the step."""

    def __init__(self, reads: str = "", drop: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.dropout = nn.Dropout(0.1)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.reads, self.drop = reads, drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for number, block in enumerate(self.blocks):
            if self.drop and torch.rand([]) < self.drop:
                continue
            x = block(x)
            if self.reads == "in a loop" and number == 1 and float(x.detach().mean()) > 1e9:
                x = x * 2
        x = self.dropout(x)
        if self.reads == "at the end":
            x = x.tanh() if float(x.detach().sum()) > 0 else x.sigmoid()
        return self.last(x)


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def rows(count: int = BATCH) -> torch.Tensor:
    return torch.randn(count, WIDTH)


class Pair:
    """The same target twice: trained eagerly, and by a plan halfway between the floor and eager's peak."""

    def __init__(self, model: nn.Module) -> None:
        torch.manual_seed(0)
        # without a state of its own that would keep another dtype
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        self.eager = Target("net", model, rows(), optimizer, mean_square)
        self.planned = twin(self.eager)
        found = lowtide.profile(
            self.planned.model, self.planned.batch, optimizer=self.planned.optimizer, loss=mean_square
        )
        self.plan = found.plan((found.floor_bytes + found.peak_bytes) // 2)
        self.plan.apply(self.planned.model)

    def change(self, change: Callable[[nn.Module], object]) -> None:
        for target in (self.eager, self.planned):
            change(target.model)

    def check(self, batch: torch.Tensor | None = None, *, seed: int = 3) -> None:
        targets = [
            replace(target, batch=target.batch if batch is None else batch)
            for target in (self.eager, self.planned)
        ]
        assert differences(*(train(target, steps=1, seed=seed) for target in targets)) == []
        peaks = []
        for target in targets:  # both, so that they stay equal
            torch.manual_seed(seed)
            peaks.append(measured_peak(target))
        assert peaks[1] <= self.plan.budget_bytes


def freeze(model: nn.Module) -> None:
    model.first.requires_grad_(False)
    model.blocks[:2].requires_grad_(False)


def thaw(model: nn.Module) -> None:
    model.requires_grad_(True)


def norm_off(model: nn.Module) -> None:
    model.norm.eval()


CHANGES: dict[str, list[Callable[[nn.Module], object]]] = {
    "frozen and thawed": [freeze, thaw, freeze],
    "a norm in eval mode": [norm_off],
    "trained in eval mode": [nn.Module.eval, nn.Module.train],
    "a graph break": [lambda model: setattr(model, "reads", "in a loop")],
}
PARTS_OF_OTHERS = ("a norm in eval mode",)
"""Changes that come with another one as well."""


@pytest.fixture(autouse=True)
def no_warnings(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "lowtide"):
        yield
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name == "lowtide"]
    assert not [words for words in told if "budget" in words]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name in PARTS_OF_OTHERS else ()) for name in CHANGES],
)
def test_a_change_gets_a_plan_of_its_own(name: str, caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(Net())
    pair.check()
    for change in CHANGES[name]:
        pair.change(change)
        pair.check()
    assert "is planned: " in caplog.text
    caplog.clear()
    for change in CHANGES[name][-2:]:
        pair.change(change)
        pair.check()
    assert "is planned: " not in caplog.text, "plans are kept"


@pytest.mark.parametrize("reads", [pytest.param("at the end", marks=pytest.mark.long), "in a loop"])
def test_several_graphs_in_other_shapes_and_situations(reads: str) -> None:
    pair = Pair(Net(reads))
    pair.check(rows(BATCH - 56))
    pair.change(freeze)
    pair.check()


@pytest.mark.long
def test_layers_that_are_dropped_at_random() -> None:
    pair = Pair(Net(drop=0.4))
    for seed in range(3):
        assert differences(*(train(t, steps=2, seed=seed) for t in (pair.eager, pair.planned))) == []


def test_another_dtype() -> None:
    pair = Pair(Net())
    pair.change(lambda model: model.bfloat16())
    for target in (pair.eager, pair.planned):
        target.optimizer.state.clear()
    pair.check(rows().bfloat16())


def test_a_discriminator_that_is_frozen_every_other_time(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    generators = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))]
    critics = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))]
    generators.append(copy.deepcopy(generators[0]))
    critics.append(copy.deepcopy(critics[0]))
    lowtide.checkpoint(generators[1], rows(), budget="1GB")
    lowtide.checkpoint(critics[1], rows(), budget="1GB")
    found = []
    for generator, critic in zip(generators, critics, strict=True):
        torch.manual_seed(5)
        for _ in range(3):
            critic.requires_grad_(True)
            made = generator(rows()).detach()
            (critic(made).mean() - critic(rows()).mean()).backward()
            critic.requires_grad_(False)
            (-critic(generator(rows())).mean()).backward()
        found.append([p.grad for p in (*generator.parameters(), *critic.parameters())])
    assert all(map(torch.equal, *found))
    assert caplog.text.count("is planned: ") == 1


def test_a_plan_for_all_of_eagers_peak_may_be_eager_itself(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, batch = nn.Embedding(1000, 16), torch.randint(0, 1000, (4,))
    plain = copy.deepcopy(model)
    found = lowtide.profile(model, batch, loss=lambda output: output.sum())
    assert found.peak_bytes == found.floor_bytes < Planner(found.step).floor_bytes
    with pytest.raises(lowtide.BudgetTooSmall):
        Planner(found.step).solve(budget_bytes=found.peak_bytes)
    with pytest.raises(lowtide.BudgetTooSmall) as error:
        found.plan(found.floor_bytes - 1)
    assert error.value.floor_bytes == found.floor_bytes
    plan = found.plan("100%")
    assert plan.solution.eager and plan.peak_bytes <= plan.budget_bytes
    plan.apply(model)
    for rows in (batch, batch[:2]):
        for one in (model, plain):
            one.zero_grad()
            one(rows).sum().backward()
        assert torch.equal(model.weight.grad, plain.weight.grad)
