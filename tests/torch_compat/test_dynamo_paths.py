"""Model code takes eager's path under Dynamo, and logs, loops and masked writes end no graph in vain."""

import copy
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from budgets import between
from torch import nn
from training import differences, train, twin

import lowtide
from lowtide.runtime.runner import runner_of
from lowtide.torch_compat import aot_autograd, dynamo
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow

WIDTH = 32
ASKS: dict[str, Callable[[], bool]] = {
    "torch.compiler.is_compiling": torch.compiler.is_compiling,
    "torch.compiler.is_dynamo_compiling": torch.compiler.is_dynamo_compiling,
    "torch._dynamo.is_compiling": torch._dynamo.is_compiling,
    "torch.compiler.is_exporting": torch.compiler.is_exporting,
}


def _stream_is_captured() -> bool:
    try:
        return torch.cuda.is_current_stream_capturing() or torch.xpu.is_current_stream_capturing()
    except Exception:
        return False


class Asks(nn.Module):
    def __init__(self, ask: Callable[[], bool]) -> None:
        super().__init__()
        self.ask = ask
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        result: torch.Tensor = self.last(hidden.sin() if self.ask() else hidden.tanh())
        return result.square().mean()


def _is_of_torchao(x: torch.Tensor) -> bool:
    return type(x).__module__.startswith("torchao.") or type(x).__name__ == "AffineQuantizedTensor"


QUESTIONS: dict[str, Callable[[torch.Tensor], bool]] = {
    "the name of a parameter's class": _is_of_torchao,
    "tensor.is_inference": torch.Tensor.is_inference,
    "torch.is_inference_mode_enabled": lambda _: torch.is_inference_mode_enabled(),
}


class AsksOfTensors(nn.Module):
    def __init__(self, ask: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.ask = ask
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x.clone())
        with torch.no_grad():
            scale = hidden.abs().amax()
        asked = [self.ask(tensor) for tensor in (x, hidden, scale, self.last.weight)]
        result: torch.Tensor = self.last(hidden.sin() if any(asked) else hidden.tanh() / scale)
        return result.square().mean()


def _check(model: nn.Module) -> None:
    torch.manual_seed(0)
    target = Target("asks", model, torch.randn(8, WIDTH), torch.optim.SGD(model.parameters(), lr=0.1))
    expected = train(twin(target))
    found = lowtide.profile(target.model, target.batch, optimizer=target.optimizer)
    assert len([graph for graph in found.step.graphs if graph.in_model]) == 1
    planned = twin(target)
    found.plan(between(found, 0.5)).apply(planned.model)
    assert differences(expected, train(planned)) == []


@pytest.mark.parametrize("name", QUESTIONS)
def test_questions_with_a_known_answer_end_no_graph(name: str) -> None:
    _check(AsksOfTensors(QUESTIONS[name]))


def test_a_tensor_of_inference_mode_is_one() -> None:
    """Its own answer, and a graph without it has another."""
    model, x = AsksOfTensors(torch.Tensor.is_inference), torch.randn(8, WIDTH)
    with torch.inference_mode():
        of_inference = x + 0
    expected = [model(batch).detach() for batch in (x, of_inference)]
    lowtide.checkpoint(model, x, budget="100%")
    found = [model(batch).detach() for batch in (x, of_inference, x)]
    assert list(map(torch.equal, found, [*expected, expected[0]])) == [True] * 3


@pytest.mark.parametrize("name", ASKS)
def test_it_is_told_that_it_is_not_compiled(name: str) -> None:
    _check(Asks(ASKS[name]))


def test_a_question_about_devices_that_are_not_there() -> None:
    _check(Asks(_stream_is_captured))


class Noted:
    """Torch cannot follow a context variable, so code that has one keeps a plain value beside it."""

    def __init__(self) -> None:
        self.context: ContextVar[int] = ContextVar("noted", default=0)
        self.plain = 0

    def note(self, value: int) -> None:
        if torch.compiler.is_compiling():
            self.plain = value
        else:
            self.context.set(value)


class Notes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.notes = Noted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.notes.note(len(x))
        result: torch.Tensor = self.layer(x)
        return result.square().mean()


def test_code_with_a_context_variable_does_not_break_the_graph() -> None:
    breaks = dynamo.graph_breaks()
    step = lowtide.profile(Notes(), torch.randn(4, WIDTH)).step
    assert len([graph for graph in step.graphs if graph.in_model]) == 1
    assert not dynamo.graph_breaks() - breaks


def test_torch_compile_of_the_users_own_is_answered_as_ever() -> None:
    lowtide.checkpoint(Notes(), torch.randn(4, WIDTH), budget="1GB")(torch.randn(4, WIDTH))
    compiled = torch.compile(lambda x: x + 1 if torch.compiler.is_compiling() else x, backend="eager")
    assert compiled(torch.zeros(1)) == 1


class Hints(nn.Module):
    """Tells torch about a tensor as libraries do in eager, for a compilation that may come later."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x)
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(state)
        return (self.layer(x).tanh() + state).sum()


def test_hints_for_the_compiler_are_no_hindrance() -> None:
    plain = Target("hints", Hints(), torch.randn(8, WIDTH))
    planned = twin(plain)
    profile = lowtide.profile(planned.model, planned.batch)
    assert sum(graph.in_model for graph in profile.step.graphs) == 1
    profile.plan(between(profile, 0.5)).apply(planned.model)
    assert differences(train(plain), train(planned)) == []


logger = logging.getLogger("a-users-model")


class Logs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        logger.warning("%d rows", len(x))
        result: torch.Tensor = self.last(hidden.tanh())
        return result.square().mean()


def test_a_log_line_does_not_break_the_graph(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = Logs(), torch.randn(4, 8)
    lowtide.checkpoint(model, batch, budget="1GB")
    caplog.clear()
    for _ in range(3):
        model(batch).backward()
    runner = runner_of(model)
    assert runner is not None and len(runner.backend.graphs) == 1
    assert [record.getMessage() for record in caplog.records if record.name == logger.name] == ["4 rows"] * 3


MASKED_WIDTH = 8


class Words(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(10, MASKED_WIDTH)
        self.special = nn.Parameter(torch.randn(MASKED_WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = super().forward(ids) * 2
        found[ids == 3] = self.special.sin()
        return found


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = Words(), nn.Linear(MASKED_WIDTH, MASKED_WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(self.words(ids)).relu()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.layer = Inner(), nn.Linear(MASKED_WIDTH, MASKED_WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(self.inner(ids)).square().sum()


def test_no_graph_is_made_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[BaseException] = []
    plain = aot_autograd.compile_graph

    def watch(*args: Any, **options: Any) -> Any:
        try:
            return plain(*args, **options)
        except BaseException as error:
            failed.append(error)
            raise

    monkeypatch.setattr(aot_autograd, "compile_graph", watch)
    torch.manual_seed(0)
    planned, ids = Outer(), torch.arange(12).reshape(3, 4) % 5
    eager = copy.deepcopy(planned)
    found = lowtide.profile(planned, ids)
    found.plan(found.peak_bytes).apply(planned)
    for batch in (ids, ids.flip(0)):
        planned(batch).backward()
        eager(batch).backward()
    assert not failed
    for ours, plain_one in zip(planned.parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours.grad, plain_one.grad)
