"""Loops that let go of what the model returns: less to count, and a warning where it is not so."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from nets import said
from torch import nn
from torch.nn import functional as F
from training import differences, measured_peak, train, twin

import lowtide
import lowtide.plans
from lowtide.verification.measure_step import peak_above_start, static_bytes
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow

ROWS, CLASSES = 64, 2000
LOGITS_BYTES = ROWS * CLASSES * 4


class Output(dict):
    """As transformers' models return."""

    @property
    def loss(self) -> torch.Tensor:
        return self["loss"]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.last(torch.tanh(self.first(x)))
        return Output(loss=F.cross_entropy(logits, labels), logits=logits)


def pair() -> tuple[Target, Target]:
    torch.manual_seed(0)
    model = Classifier()
    batch = {"x": torch.randn(ROWS, 16), "labels": torch.randint(0, CLASSES, (ROWS,))}
    target = Target("model", model, batch, torch.optim.SGD(model.parameters(), lr=0.1), holds_outputs=False)
    return target, twin(target)


def test_outputs_that_nobody_holds_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    plain, planned = pair()
    options = {"optimizer": planned.optimizer}
    held = lowtide.profile(planned.model, planned.batch, **options)
    found = lowtide.profile(planned.model, planned.batch, holds_outputs=False, **options)
    assert found.peak_bytes <= held.peak_bytes - 0.9 * LOGITS_BYTES
    assert found.floor_bytes < held.floor_bytes
    plan = found.plan(found.floor_bytes)
    plan.apply(planned.model)
    assert differences(train(plain), train(planned)) == []
    assert measured_peak(planned) <= plan.budget_bytes
    assert abs(measured_peak(plain) / plan.baseline_peak_bytes - 1) < 0.01
    assert said(caplog) == []


def test_a_loop_that_holds_them_all_the_same_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    _, planned = pair()
    found = lowtide.profile(planned.model, planned.batch, holds_outputs=False)
    found.plan(found.floor_bytes).apply(planned.model)
    for _ in range(3):
        output = planned.model(**planned.batch)
        output.loss.backward()
    (words,) = said(caplog)[:1]
    assert f"{LOGITS_BYTES} bytes" in words and "holds_outputs=True" in words
    assert sum("holds_outputs" in line for line in said(caplog)) == 1


class TwoParts(nn.Module):
    """Returns a result of its first graph, which both graphs save, beside its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 512), nn.Linear(512, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return Output(loss=F.cross_entropy(self.last(hidden), labels), hidden=hidden)


def test_what_an_earlier_graph_saved_is_not_held_by_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    _, like = pair()
    planned, batch = TwoParts(), like.batch
    found = lowtide.profile(planned, batch, holds_outputs=False)
    found.plan("100%").apply(planned)
    for _ in range(2):
        planned(**batch).loss.backward()
    assert not [line for line in said(caplog) if "holds_outputs" in line]
    output = planned(**batch)
    output.loss.backward()
    assert [line for line in said(caplog) if "holds_outputs" in line]


def test_a_plan_in_a_file_says_so(tmp_path) -> None:
    _, planned = pair()
    found = lowtide.profile(planned.model, planned.batch, holds_outputs=False)
    found.save(tmp_path / "profile.json")
    plan = lowtide.load_profile(tmp_path / "profile.json").plan("90%")
    plan.save(tmp_path / "plan.json")
    assert not lowtide.load_plan(tmp_path / "plan.json").solution.holds_outputs


class Head(nn.Module):
    """Returns its logits and its loss, as small GPTs do: the peak of a tight plan is in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in "ab")
        )
        self.last = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.last(self.body(x))
        return logits, F.cross_entropy(logits, labels)


def second(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return output[1]


@pytest.fixture(scope="module")
def lowest() -> lowtide.Plan:
    """The lowest plan of a `Head` on one batch."""
    head = head_and_batch()
    found = lowtide.profile(head.model, head.batch, optimizer=head.optimizer, loss=second)
    return found.plan(found.floor_bytes)


def head_and_batch() -> Target:
    torch.manual_seed(0)
    model = Head()
    batch = (torch.randn(ROWS, 32), torch.randint(0, CLASSES, (ROWS,)))
    return Target("head", model, batch, torch.optim.SGD(model.parameters(), lr=0.1), second)


def name_the_outputs(target: Target, *, steps: int = 3, kept: list[torch.Tensor] | None = None) -> None:
    """The commonest loop: `logits` is the last step's until the call returns."""
    for _ in range(steps):
        logits, loss = target.model(*target.batch)
        loss.backward()
        target.optimizer.step()
        target.optimizer.zero_grad()
        if kept is not None:
            kept.append(logits.detach())


def peak_of(loop: Callable[[], object], target: Target) -> int:
    loop()
    return static_bytes(target.model, target.batch, target.optimizer) + peak_above_start(loop)


def test_the_last_outputs_count_while_the_next_forward_pass_runs(lowest, caplog) -> None:
    plain, planned = head_and_batch(), head_and_batch()
    lowest.apply(planned.model)
    measured = peak_of(lambda: name_the_outputs(planned), planned)
    assert measured <= lowest.budget_bytes
    assert abs(measured / lowest.peak_bytes - 1) < 0.01
    baseline = peak_of(lambda: name_the_outputs(plain), plain)
    assert abs(baseline / lowest.baseline_peak_bytes - 1) < 0.01
    assert all(map(torch.equal, plain.model.parameters(), planned.model.parameters()))
    (words,) = said(caplog)
    assert f"{LOGITS_BYTES} bytes" in words and "`del`" in words


def test_the_canonical_loop_names_its_outputs(lowest) -> None:
    target = head_and_batch()
    measured = lowtide.measure_step(
        target.model, target.batch, optimizer=target.optimizer, loss=second, plan=lowest
    )
    assert abs(measured.peak_bytes / lowest.peak_bytes - 1) < 0.01


def test_a_loop_that_collects_outputs_is_told_once(lowest, caplog) -> None:
    target = head_and_batch()
    lowest.apply(target.model)
    name_the_outputs(target, steps=8, kept=[])
    (words,) = [line for line in said(caplog) if "reserve=" in line]
    assert f"reserve={LOGITS_BYTES}" in words


def test_an_output_that_lives_through_the_next_step_is_told(lowest, caplog) -> None:
    target = head_and_batch()
    lowest.apply(target.model)
    before = None
    for _ in range(4):
        logits, loss = target.model(*target.batch)
        loss.backward()
        target.optimizer.zero_grad()
        before = logits
    assert before is not None
    assert sum("besides those of the last call" in line for line in said(caplog)) == 1


def test_outputs_of_an_evaluation_in_between_are_told(lowest, caplog) -> None:
    target = head_and_batch()
    lowest.apply(target.model)
    for _ in range(3):
        name_the_outputs(target, steps=1)
        with torch.no_grad():
            scores, _ = target.model.eval()(*target.batch)
            more, _ = target.model(*target.batch)
        target.model.train()
    assert scores.shape == more.shape
    assert sum("besides those of the last call" in line for line in said(caplog)) == 1


def test_outputs_that_the_loop_lets_go_of_are_not_told(lowest, caplog) -> None:
    target = head_and_batch()
    lowest.apply(target.model)
    for _ in range(3):
        name_the_outputs(target, steps=1)
    assert said(caplog) == []


def test_larger_outputs_of_the_last_step_are_counted(lowest, caplog) -> None:
    """A plan of before, whose file has no such bytes."""
    target = head_and_batch()
    solution = lowest.solution
    earlier = replace(solution, reserve=replace(solution.reserve, last_output_bytes=0))
    lowtide.plans.Plan(earlier).apply(target.model)
    name_the_outputs(target)
    assert any("earlier outputs live through the forward pass" in line for line in said(caplog))
    assert peak_of(lambda: name_the_outputs(target), target) <= lowest.budget_bytes


def test_a_budget_below_the_floor_says_what_the_outputs_take() -> None:
    target = head_and_batch()
    found = lowtide.profile(target.model, target.batch, optimizer=target.optimizer, loss=second)
    with pytest.raises(lowtide.BudgetTooSmall, match=r"outputs of the last step.*holds_outputs=False"):
        found.plan(found.floor_bytes - 4096)
