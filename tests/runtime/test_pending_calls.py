"""Several calls of a model before one backward pass: planned together from the second such step on."""

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

import lowtide
from lowtide.planning import repeated_graphs
from lowtide.runtime.pending_calls import CallsPlanner
from lowtide.verification.measure_step import peak_above_start, static_bytes

pytestmark = pytest.mark.slow

WIDTH = 32


class Encoder(nn.Module):
    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = x + block(x)
            if self.breaks and number == 0:
                torch._dynamo.graph_break()
        return x.mean(1)


def rows(seed: int, length: int = 32) -> torch.Tensor:
    return torch.randn(32, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def contrast(*outputs: torch.Tensor) -> torch.Tensor:
    first, *others = (nn.functional.normalize(output) for output in outputs)
    targets = torch.arange(len(first))
    return sum((nn.functional.cross_entropy(first @ other.t(), targets) for other in others), torch.zeros(()))


def train(model: nn.Module, *batches: torch.Tensor) -> None:
    contrast(*(model(batch) for batch in batches)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None


class Loop:
    """A model and its copy without a plan, for steps of two equal calls in a share of the bytes."""

    def __init__(self, share: float, *, train: Callable[..., None] = train, breaks: bool = False) -> None:
        torch.manual_seed(0)
        self.plain = Encoder(breaks=breaks)
        self.planned = copy.deepcopy(self.plain)
        self.train = train
        self.budget_bytes = int(self.peak_bytes(copy.deepcopy(self.plain), rows(0), rows(1)) * share)
        lowtide.checkpoint(self.planned, rows(0), budget=self.budget_bytes)

    def peak_bytes(self, model: nn.Module, *batches: torch.Tensor) -> int:
        return peak_above_start(lambda: self.train(model, *batches)) + static_bytes(model, batches)

    def step(self, *batches: torch.Tensor) -> None:
        self.train(self.planned, *batches)
        self.check(*batches)

    def measured_step(self, *batches: torch.Tensor) -> int:
        nbytes = self.peak_bytes(self.planned, *batches)
        self.check(*batches)
        return nbytes

    def check(self, *batches: torch.Tensor) -> None:
        self.train(self.plain, *batches)
        assert all(map(torch.equal, self.planned.parameters(), self.plain.parameters()))


@pytest.fixture(autouse=True)
def few_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_graphs, "NUM_BUDGETS", 4)


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The peaks of the steps that were planned for several calls."""
    peaks: list[int] = []
    plain = CallsPlanner.plan

    def plan(self: CallsPlanner, *args: object, **options: str) -> object:
        found = plain(self, *args, **options)  # type: ignore[arg-type]
        peaks.append(found.peak_bytes)
        return found

    monkeypatch.setattr(CallsPlanner, "plan", plan)
    return peaks


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("breaks", [False, True])
def test_two_calls_keep_the_budget_from_the_second_step_on(
    breaks: bool, predicted: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(0.65, breaks=breaks)
    loop.step(rows(2), rows(3))
    (words,) = told(caplog)
    assert "is called 2 times before a backward pass" in words and "all calls of a step together" in words
    loop.step(rows(4), rows(5))
    for seed in (6, 8):
        measured = loop.measured_step(rows(seed), rows(seed + 1))
        assert measured <= loop.budget_bytes
        assert abs(predicted[0] / measured - 1) < 0.01
    assert len(predicted) == 1


def test_more_calls_are_planned_again(predicted: list[int], caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(0.8)
    for number in (2, 2, 3, 3):
        loop.step(*map(rows, range(number)))
    measured = loop.measured_step(*map(rows, range(3)))
    assert measured <= loop.budget_bytes and abs(predicted[-1] / measured - 1) < 0.01
    assert len(predicted) == 2 and len(told(caplog)) == 2


def test_calls_of_other_shapes(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(0.65)
    for lengths in ((32, 32), (32, 32)):
        loop.step(*(rows(seed, length) for seed, length in enumerate(lengths)))
    for lengths in ((12, 32), (32, 20), (20, 32), (32, 12)):
        assert loop.measured_step(*(rows(7 + i, n) for i, n in enumerate(lengths))) <= loop.budget_bytes


def test_a_part_of_the_loss_between_the_calls_counts(predicted: list[int]) -> None:
    def train_wide(model: nn.Module, *batches: torch.Tensor) -> None:
        # each call's rows, repeated, are saved before the next call
        parts = [model(batch).repeat(1, 400).sin().mean(1) for batch in batches]
        sum(parts, torch.zeros(())).sum().backward()
        model.zero_grad()

    loop = Loop(0.75, train=train_wide)
    for _ in range(2):
        loop.step(rows(2), rows(3))
    assert loop.measured_step(rows(4), rows(5)) <= loop.budget_bytes
    assert predicted


def test_calls_that_do_not_fit_are_told_once_with_the_lowest_peak(
    predicted: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(0.3)
    for _ in range(3):
        loop.step(*map(rows, range(6)))
    words = told(caplog)
    assert len(words) == 2 and f"plan for a budget of {predicted[0]} bytes" in words[1]


def test_a_call_without_gradients_before_the_backward_pass_counts_as_the_loss() -> None:
    def train_beside_target(model: nn.Module, *batches: torch.Tensor) -> None:
        output = model(batches[0])
        with torch.no_grad():
            target = model(batches[0])
        (output - target).square().mean().backward()
        model.zero_grad()

    loop = Loop(0.7, train=train_beside_target)
    for _ in range(2):
        loop.step(rows(2))
    assert loop.measured_step(rows(4)) <= loop.budget_bytes


def test_a_large_budget_is_planned_once(predicted: list[int], caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(4.0)
    for _ in range(3):
        loop.step(rows(2), rows(3))
    assert not predicted and not told(caplog)
