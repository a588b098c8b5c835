"""Masks as bits, signs as bits, narrow indices: chosen where they pay, and exact."""

from collections.abc import Callable

import pytest
import torch
from plans_by_hand import by_hand
from torch import nn
from torch.nn import functional as F
from training import differences, measured_peak, train, twin

import lowtide
from lowtide.facts import Action
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow

ROWS, WIDTH = 512, 64


class Layers(nn.Module):
    """Linear layers with something between them."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor], depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.between(layer(x))
        return x.square().mean()


class Pools(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.first(x), 3, stride=1, padding=1)
        x = F.max_pool2d(self.second(x), 3, stride=1, padding=1)
        return x.square().mean()


class Hashed(nn.Module):
    """Rows of a table, of which the model itself computes the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(300, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.last(self.table(x * 7919 % 300))).square().mean()


def dropped(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.3)


def rectified(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(torch.relu(x), 0.3)


def leaking(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(F.leaky_relu(x), 0.3)


def chosen(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.sin().cumsum(1) > x, x, x.neg()) + 0.1 * x


def sorted_rows(x: torch.Tensor) -> torch.Tensor:
    return x.sort(dim=1).values


def read_twice(x: torch.Tensor) -> torch.Tensor:
    """A ReLU whose value, and not only its sign, is read in backward."""
    y = torch.relu(x)
    return y * torch.tanh(y)


CASES = {
    "bits": (Layers(dropped), torch.randn(ROWS, WIDTH)),
    "sign": (Layers(rectified), torch.randn(ROWS, WIDTH)),
    "leaky": (Layers(leaking), torch.randn(ROWS, WIDTH)),
    "where": (Layers(chosen), torch.randn(ROWS, WIDTH)),
    "sort": (Layers(sorted_rows), torch.randn(ROWS, WIDTH)),
    "pool": (Pools(), torch.randn(2, 3, 40, 40)),
    "both": (Layers(read_twice), torch.randn(ROWS, WIDTH)),
    "lookup": (Hashed(), torch.randint(0, 1 << 20, (ROWS, WIDTH))),
}
METHOD = {
    "bits": "bits",
    "sign": "sign",
    "leaky": "sign",
    "where": "bits",
    "sort": "narrow",
    "pool": "narrow",
    "both": "sign",
    "lookup": "narrow",
}


def pair(case: str) -> tuple[Target, Target]:
    torch.manual_seed(0)
    model, batch = CASES[case]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    target = Target(case, model, batch, optimizer)
    return twin(target), twin(target)


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", METHOD)
def test_a_packed_value_gives_eagers_bits(case: str) -> None:
    plain, planned = pair(case)
    found = lowtide.profile(planned.model, planned.batch, optimizer=planned.optimizer)
    plan = by_hand(found, METHOD[case])
    assert any(run.rule == METHOD[case] for run in plan.solution.schedule.runs)
    plan.apply(planned.model)
    assert differences(train(plain), train(planned)) == []
    assert abs(measured_peak(planned) / plan.peak_bytes - 1) < 0.01


@pytest.mark.parametrize("case", ["bits", "sign", "pool"])
def test_a_plan_at_the_floor_is_exact(case: str) -> None:
    plain, planned = pair(case)
    found = lowtide.profile(planned.model, planned.batch, optimizer=planned.optimizer)
    plan = found.plan(found.floor_bytes)
    plan.apply(planned.model)
    assert differences(train(plain), train(planned)) == []
    assert measured_peak(planned) <= plan.budget_bytes


def test_the_planner_takes_narrow_indices_rather_than_sort_again() -> None:
    _, planned = pair("sort")
    found = lowtide.profile(planned.model, planned.batch, optimizer=planned.optimizer)
    plan = found.plan("80%")
    narrow = [decision for decision in plan.decisions if decision.method == "narrow"]
    assert narrow and all(decision.action is Action.RETAINED for decision in narrow)
    assert all(8 * decision.held_bytes == decision.nbytes for decision in narrow)
