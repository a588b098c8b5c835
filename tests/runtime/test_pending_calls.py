"""Several calls of a model before one backward pass: planned together from the second such step on."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path

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


@pytest.mark.sample(1)
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


def planned_for(
    number: int, *, share: float = 0.3, accumulate: bool = False
) -> tuple[nn.Module, nn.Module, lowtide.Plan]:
    """A model without a plan, and its copy with a plan for so many calls of a step."""
    torch.manual_seed(0)
    plain = Encoder()
    model = copy.deepcopy(plain)
    profile = lowtide.profile(model, rows(0), calls=number, accumulate=accumulate)
    budget = profile.floor_bytes + int(share * (profile.peak_bytes - profile.floor_bytes))
    plan = profile.plan(budget)
    plan.apply(model)
    return plain, model, plan


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [2, 3])
def test_calls_that_are_named_keep_the_budget_from_the_first_step_on(
    number: int, predicted: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    plain, model, plan = planned_for(number, share=0.5)
    batches = [rows(seed) for seed in range(number)]
    for _ in range(2):
        train(model, *batches)
        train(plain, *batches)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    measured = peak_above_start(lambda: train(model, *batches)) + static_bytes(model, batches)
    assert measured <= plan.budget_bytes
    # the bytes of the loss are seen in the first step
    assert not any("is called" in words for words in told(caplog))
    assert not predicted or number > 2


def in_turn(model: nn.Module, number: int, batches: list[torch.Tensor]) -> None:
    """Run the backward pass of the first call while later ones are pending, as a stage of a pipeline does."""
    waiting: list[torch.Tensor] = []
    for batch in batches:
        waiting.append(model(batch))
        if len(waiting) == number:
            waiting.pop(0).square().mean().backward()
    while waiting:
        waiting.pop(0).square().mean().backward()


def test_calls_whose_backward_passes_come_in_turn_are_pending_one_by_one(
    predicted: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    plain, model, plan = planned_for(2, accumulate=True)
    batches = [rows(seed) for seed in range(6)]
    peaks = []
    for _ in range(3):
        for one in (plain, model):
            one.zero_grad()
        in_turn(plain, 2, batches)
        peaks.append(peak_above_start(lambda: in_turn(model, 2, batches)) + static_bytes(model, batches[:2]))
        one, other = ([p.grad for p in each.parameters()] for each in (plain, model))
        assert all(map(torch.equal, one, other))
    assert max(peaks[1:]) <= plan.budget_bytes
    assert not predicted and not told(caplog)


def test_a_plan_of_several_calls_comes_back_from_its_file(tmp_path: Path) -> None:
    plain, model, plan = planned_for(2)
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = lowtide.load_plan(path)
    assert loaded.solution == plan.solution and loaded.solution.calls == 2
    assert sum(graph.in_model for graph in loaded.solution.graphs) == 1
    loaded.apply(lowtide.remove(model))
    train(model, rows(1), rows(2))
    train(plain, rows(1), rows(2))
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_a_profile_of_several_calls_comes_back_from_its_file(tmp_path: Path) -> None:
    profile = lowtide.profile(Encoder(), rows(0), calls=3)
    path = tmp_path / "profile.json"
    profile.save(path)
    loaded = lowtide.load_profile(path)
    assert loaded.peak_bytes == profile.peak_bytes and loaded.step.calls == 3
    assert loaded.plan("80%").solution.reserve == profile.plan("80%").solution.reserve


@pytest.mark.parametrize("calls", [0, -1, 2.0, "2", True])
def test_a_number_of_calls_that_is_none_is_refused(calls: object) -> None:
    with pytest.raises(lowtide.LowtideError, match=f"calls={calls!r} is no number of calls"):
        lowtide.profile(Encoder(), rows(0), calls=calls)  # type: ignore[arg-type]


def test_what_is_planned_for_one_call_is_refused_for_several() -> None:
    model = Encoder()
    with pytest.raises(
        lowtide.LowtideError, match="step_in_backward is planned for a backward pass after each"
    ):
        lowtide.profile(model, rows(0), calls=2, step_in_backward=True)
    with pytest.raises(lowtide.LowtideError, match="leave calls or ranks out"):
        lowtide.profile(model, rows(0), calls=2, ranks=2)
    plan = lowtide.profile(model, rows(0), calls=2).plan("100%")
    with pytest.raises(lowtide.LowtideError, match="trains one call of the model for each step"):
        lowtide.verify(model, rows(0), plan)
