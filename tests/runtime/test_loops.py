"""Loops that do more than the plan counts on: seen at the first step, told once, and planned for."""

import copy
import gc
import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training import measured_peak

import lowtide
from lowtide.planning.repeated_graphs import planner_for
from lowtide.runtime import loop_reserve
from lowtide.runtime.runner import runner_of
from lowtide.torch_compat import autograd_engine, dispatch
from lowtide.units import format_size
from lowtide.verification.measure_step import peak_above_start, static_bytes, train_step
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow

WIDTH, CLASSES, BATCH = 64, 300, 256


class Classifier(nn.Module):
    """Logits; with targets also its own loss, and the features behind the logits."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.blocks = nn.Sequential(*blocks, nn.Dropout(0.1))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        features = self.blocks(x)
        logits = self.head(features)
        if targets is None:
            return logits
        return {"loss": F.cross_entropy(logits, targets), "logits": logits, "features": features}


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(BATCH, WIDTH), "targets": torch.randint(0, CLASSES, (BATCH,))}


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def train_both(model: nn.Module, planned: nn.Module, batch: Any, loss: Callable[[Any], torch.Tensor]) -> None:
    """Three steps of each, to the last bit."""
    for seed in range(3):
        found = []
        for one in (model, planned):
            torch.manual_seed(seed)
            one.zero_grad()
            value = loss(one(**batch))
            value.backward()
            found.append([value.detach(), torch.get_rng_state(), *(p.grad for p in one.parameters())])
        assert all(map(torch.equal, *found))
    planned.zero_grad()


@pytest.mark.parametrize("times", [1, 6])
def test_a_loss_that_was_not_given_is_planned_for(
    times: int, batch: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    targets = batch.pop("targets")

    def loss(output: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.repeat(times, 1), targets.repeat(times))

    model = Classifier()
    planned = copy.deepcopy(model)
    whole = lowtide.profile(planned, batch, loss=loss)
    # what the loop will need, which the plan knows nothing of
    budget = (whole.floor_bytes + whole.peak_bytes) // 2
    lowtide.checkpoint(planned, batch, budget=budget)
    if times == 1:
        above = peak_above_start(lambda: train_step(planned, batch, None, loss))
        assert static_bytes(planned, batch, None) + above <= budget, "the first step"
    train_both(model, planned, batch, loss)
    if times == 1:
        assert told(caplog) == []
        assert runner_of(planned).backend.num_graphs == 1
    else:
        (words,) = told(caplog)
        assert "the loop made" in words and "Pass `loss=`" in words
    assert measured_peak(Target("planned", planned, batch, None, loss)) <= budget
    assert not dispatch.active_modes()


def test_the_room_for_a_loss_is_given_back_where_it_is_not_needed(
    batch: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    targets = batch.pop("targets")
    model = Classifier()
    planned = copy.deepcopy(model)
    whole = lowtide.profile(planned, batch, loss=lambda output: F.cross_entropy(output, targets))
    plan = lowtide.profile(planned, batch).plan((whole.floor_bytes + whole.peak_bytes) // 2)
    plan.apply(planned)
    first = runner_of(planned).schedules.graphs
    train_both(model, planned, batch, torch.mean)
    own = {graph.fingerprint: (graph,) for graph in plan.solution.graphs if graph.in_model}
    assert first != own and runner_of(planned).schedules.graphs == own
    assert told(caplog) == []
    assert measured_peak(Target("planned", planned, batch, None, torch.mean)) <= plan.budget_bytes


def test_bytes_for_a_loss_are_searched_once(
    batch: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch.pop("targets")
    model = Classifier()
    found = lowtide.profile(model, batch)
    plan = found.plan((found.floor_bytes + found.peak_bytes) // 2)
    searches = []
    monkeypatch.setattr(loop_reserve, "planner_for", lambda step: searches.append(step) or planner_for(step))
    for _ in range(2):
        plan.apply(model)
    assert len(searches) == 1


def test_a_loss_that_was_given_is_no_news(
    batch: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    targets = batch.pop("targets")
    model = Classifier()
    planned = copy.deepcopy(model)
    lowtide.checkpoint(planned, batch, budget="80%", loss=lambda output: F.cross_entropy(output, targets))
    train_both(model, planned, batch, lambda output: F.cross_entropy(output, targets))
    assert told(caplog) == []
    assert runner_of(planned).backend.num_graphs == 1


def test_a_gradient_for_an_output_that_the_plan_leaves_out(
    batch: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    def loss(output: dict[str, torch.Tensor]) -> torch.Tensor:
        return output["loss"] + output["logits"].square().mean() + output["features"].abs().mean()

    model = Classifier()
    planned = copy.deepcopy(model)
    whole = lowtide.profile(planned, batch, loss=loss)
    budget = (whole.floor_bytes + whole.peak_bytes) // 2
    lowtide.checkpoint(planned, batch, budget=budget)
    train_both(model, planned, batch, loss)
    assert "the loss reads output" in told(caplog)[0]
    assert measured_peak(Target("planned", planned, batch, None, loss)) <= budget


SMOOTH = torch.randint(0, CLASSES, (BATCH,), generator=torch.Generator().manual_seed(3))
SMOOTH[::3] = -100
WEIGHT = torch.rand(CLASSES, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(
    "loss",
    [
        lambda output: (1 + 0.01 * output).view(-1, 50).prod(1).mean(),
        lambda output: F.cross_entropy(output, SMOOTH, weight=WEIGHT, label_smoothing=0.1),
        lambda output: (1 + 0.01 * output).cumprod(1).mean(),
        lambda output: output.norm(dim=1).sum() + torch.linalg.vector_norm(output, 3),
        lambda output: F.binary_cross_entropy_with_logits(output, output.detach().sigmoid()),
    ],
)
def test_watching_changes_no_bit(loss: Callable[[Any], torch.Tensor], batch: dict[str, torch.Tensor]) -> None:
    """Ops of ATen that take another branch under a dispatch mode."""
    batch.pop("targets")
    model = Classifier()
    planned = copy.deepcopy(model)
    lowtide.checkpoint(planned, batch, budget="1GB")
    train_both(model, planned, batch, loss)


def test_a_watch_is_no_mode(batch: dict[str, torch.Tensor]) -> None:
    batch.pop("targets")
    planned = lowtide.checkpoint(Classifier(), batch, budget="1GB")
    output = planned(**batch)
    assert is_watched()
    assert not dispatch.active_modes() and not torch.autograd.profiler._is_profiler_enabled
    with torch.inference_mode():
        planned(**batch)
        assert is_watched(), "as a part of the loss"
        for _ in range(8):
            planned(**batch)
    assert not is_watched(), "an evaluation"
    output.sum().backward()


def test_a_profiler_may_begin_at_any_time(
    batch: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    batch.pop("targets")
    planned = lowtide.checkpoint(Classifier(), batch, budget="1GB")
    other = lowtide.checkpoint(Classifier(), batch, budget="1GB")
    caplog.clear()
    loss = planned(**batch).log_softmax(1).sum()
    assert is_watched()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        loss.backward()
    assert any("CompiledFunctionBackward" in event.name for event in found.events())
    assert not is_watched() and told(caplog) == []
    for _ in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            other(**batch).log_softmax(1).sum().backward()
    (words,) = told(caplog)
    assert "a profiler is on" in words
    output = other(**batch)
    assert is_watched(), "the first step without a profiler"
    del output
    assert "Memory block of unknown size" not in capfd.readouterr().err


def test_more_than_the_given_loss_is_told_and_planned_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # a size of its own: blocks of other tests are freed at any time
    batch = {"x": torch.randn(BATCH - 56, WIDTH)}
    targets = torch.randint(0, CLASSES, (BATCH - 56,))

    def given(output: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, targets)

    def loss(output: torch.Tensor) -> torch.Tensor:
        logs = output.log_softmax(-1)
        return given(output) + 0.01 * (logs.exp() * logs).sum(-1).mean()

    model = Classifier()
    planned = copy.deepcopy(model)
    whole = lowtide.profile(planned, batch, loss=loss)
    budget = (whole.floor_bytes + whole.peak_bytes) // 2
    lowtide.checkpoint(planned, batch, budget=budget, loss=given)
    train_both(model, planned, batch, loss)
    observed = runner_of(planned)
    measured = measured_peak(Target("planned", planned, batch, None, loss))
    assert measured <= budget, (told(caplog), observed.schedules._context.reserve, vars(observed.observer))
    lowest = lowtide.profile(lowtide.remove(planned), batch, loss=given)
    lowest.plan(lowest.floor_bytes).apply(planned)
    caplog.clear()
    train_both(model, planned, batch, loss)
    words = told(caplog)
    assert "more than the plan counts by the given `loss=`" in words[0]


@pytest.mark.parametrize("keep", [torch.Tensor.detach, lambda logits: logits[:, :2], lambda logits: logits])
def test_a_view_keeps_an_output(
    keep: Callable[[torch.Tensor], torch.Tensor],
    batch: dict[str, torch.Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    planned = Classifier()
    found = lowtide.profile(planned, batch, holds_outputs=False)
    found.plan((found.floor_bytes + found.peak_bytes) // 2).apply(planned)
    caplog.clear()
    planned(**batch)["loss"].backward()
    planned.zero_grad()
    output = planned(**batch)
    loss, logits = output["loss"], keep(output["logits"])
    del output
    assert told(caplog) == []
    loss.backward()
    del logits
    (words,) = told(caplog)
    assert "keeps 300.0 KiB (307200 bytes) of the model's outputs" in words


def test_an_input_or_weight_that_is_an_output_is_not_kept_by_the_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            loss = self.inner(x).tanh().square().mean()
            return {"loss": loss, "x": x, "rows": x[2:], "weight": self.inner.weight.T}

    x = torch.randn(BATCH, WIDTH)
    planned = lowtide.checkpoint(Tied(), x, budget="100%", holds_outputs=False)
    caplog.clear()
    for _ in range(2):
        planned(x)["loss"].backward()
        planned.zero_grad()
    assert told(caplog) == []


def test_a_call_before_the_last_one_was_differentiated_is_told_once(
    batch: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    planned = Classifier()
    found = lowtide.profile(planned, batch)
    found.plan((found.floor_bytes + found.peak_bytes) // 2).apply(planned)
    planned(**batch)
    planned(**batch)["loss"].backward()
    assert told(caplog) == [], "nobody holds the first output"
    for _ in range(2):
        planned.zero_grad()
        (planned(**batch)["loss"] + planned(**batch)["loss"]).backward()
    words = told(caplog)
    assert "called 2 times before a backward pass" in words[0] and len(words) <= 2


def test_a_graph_that_is_kept_is_told_once(
    batch: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    planned = Classifier()
    found = lowtide.profile(planned, batch)
    found.plan((found.floor_bytes + found.peak_bytes) // 2).apply(planned)
    planned(**batch)["loss"].backward()
    assert told(caplog) == []
    for _ in range(2):
        planned.zero_grad()
        loss = planned(**batch)["loss"]
        loss.backward(retain_graph=True)
        loss.backward()
    (words,) = told(caplog)
    assert "backward(retain_graph=True) keeps" in words and "smaller by" in words


class TwoPaths(nn.Module):
    """Trains one of two halves in each step."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.first, self.second = nn.Sequential(*layers[:4]), nn.Sequential(*layers[4:])
        self.is_first = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) if self.is_first else self.second(x)


def test_state_of_parameters_that_other_steps_train_is_counted(
    batch: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    x = batch["x"]
    models = [TwoPaths(), TwoPaths()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    wrapper = torch.optim.AdamW(models[1].parameters())  # as trainers wrap one in another
    wrapper.state = optimizers[1].state
    found = lowtide.profile(models[1], x, optimizer=optimizers[1], loss=mean_square)
    state_bytes = 2 * sum(p.nbytes for p in models[1].first.parameters())
    budget = found.floor_bytes + state_bytes + (1 << 10)
    assert budget < found.peak_bytes, "the plan saves something"
    found.plan(budget).apply(models[1])
    caplog.clear()
    for which in (False, True, False, True, False):
        for model, optimizer in zip(models, optimizers, strict=True):
            model.is_first = which
            mean_square(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    (words,) = told(caplog)
    assert f"the optimizer's state takes {format_size(state_bytes + 16)}" in words
    assert "Not every step trains all parameters" in words
    target = Target("planned", models[1], x, optimizers[1], mean_square)
    assert measured_peak(target) <= budget


def test_state_of_an_optimizer_that_the_plan_does_not_know_is_told(
    batch: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    x = batch["x"]
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    planned = torch.optim.SGD(model.parameters(), lr=0.1)
    found = lowtide.profile(model, x, optimizer=planned, loss=mean_square)
    found.plan(found.floor_bytes).apply(model)
    optimizer = torch.optim.AdamW(model.parameters())
    wrapped = torch.optim.AdamW(model.parameters())  # as trainers wrap one in another
    wrapped.state = optimizer.state
    caplog.clear()
    for _ in range(3):
        mean_square(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state_bytes = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    words = [line for line in told(caplog) if "optimizer's state" in line and "planned again" in line]
    assert len(words) == 1 and "Plan with optimizer= the one that trains the model" in words[0]
    assert f"the optimizer's state takes {format_size(state_bytes)}" in words[0]


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


# without the plan


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))


def call_forward(model: nn.Module) -> None:
    model.forward(torch.ones(4, 8)).sum().backward()


def call_compiled(model: nn.Module) -> None:
    torch.compile(model, backend="eager")(torch.ones(4, 8)).sum().backward()


def call_from_compiled(model: nn.Module) -> None:
    torch.compile(lambda x: model(x).sum(), backend="eager")(torch.ones(4, 8)).backward()


def compile_in_place(model: nn.Module) -> None:
    model.compile(backend="eager")
    model(torch.ones(4, 8)).sum().backward()


@pytest.mark.parametrize("bypass", [call_forward, call_compiled, call_from_compiled, compile_in_place])
def test_training_past_the_plan_is_told_once(
    bypass: Callable[[nn.Module], None], caplog: pytest.LogCaptureFixture
) -> None:
    model = lowtide.checkpoint(small(), torch.ones(4, 8), budget="1GB")
    model(torch.ones(4, 8)).sum().backward()
    assert told(caplog) == []
    for _ in range(2):
        bypass(model)
    (words,) = told(caplog)
    assert "budget is not kept" in words
    assert ("model.compile()" in words) is (bypass is compile_in_place)


def save_and_load(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize(
    ("copied", "words"), [(copy.deepcopy, "plan.apply(copy)"), (save_and_load, "plan.save(path)")]
)
def test_a_copy_that_trains_without_a_plan_is_told_once(
    copied: Callable[[nn.Module], nn.Module], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = lowtide.checkpoint(small(), torch.ones(4, 8), budget="1GB")
    for _ in range(2):
        copied(model)(torch.ones(4, 8)).sum().backward()
    (found,) = told(caplog)
    assert words in found
    copied(lowtide.remove(model))(torch.ones(4, 8)).sum().backward()
    assert len(told(caplog)) == 1 and "_lowtide_plan" not in vars(model)


def test_a_copy_to_evaluate_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    model = lowtide.checkpoint(small(), torch.ones(4, 8), budget="1GB")
    with torch.no_grad():
        copy.deepcopy(model)(torch.ones(4, 8))
    assert told(caplog) == []


def is_watched() -> bool:
    """Whether the bytes of this thread are recorded."""
    return autograd_engine.profiler_is_active()


def fails(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    output = model(**batch)
    assert is_watched()
    raise ValueError(output.shape)


def test_no_watch_stays_behind(batch: dict[str, torch.Tensor]) -> None:
    """Neither a loop that raises, nor one that breaks off, nor a backward pass leaves a watch behind."""
    batch.pop("targets")

    def new() -> nn.Module:
        return lowtide.checkpoint(Classifier(), batch, budget="1GB")

    plain = torch.autograd._engine_run_backward, torch.autograd.profiler._run_on_profiler_start
    with pytest.raises(ValueError, match=r"torch\.Size"):
        fails(new(), batch)
    assert not is_watched()
    model = new()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(**batch)
    assert not is_watched(), "the output was dropped"
    lowtide.remove(model)
    output = new()(**batch)
    with pytest.raises(RuntimeError, match="scalar"):
        output.backward()
    assert is_watched(), "no backward pass came"
    torch.ones(1, requires_grad=True).sum().backward()
    assert is_watched(), "that of another model came"
    output.sum().backward()
    assert not is_watched()
    loss = new()(**batch).sum()
    loss.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    del loss, output
    assert not is_watched()
    gc.collect()
    assert plain == (torch.autograd._engine_run_backward, torch.autograd.profiler._run_on_profiler_start)


class TwoOrders(nn.Module):
    """Two results of the first graph have one memory order, and their gradients come in two."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.over = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.one(x), self.two(x)
        torch._dynamo.graph_break()
        return self.over(one.transpose(1, 2)).sin().sum() + two.sin().sum()


def test_gradients_between_graphs_are_known_from_the_capture(caplog: pytest.LogCaptureFixture) -> None:
    """Planned again for the order of one gradient, graphs with the other were no longer exact."""
    model, x = TwoOrders(), torch.randn(3, 5, 8)
    planned = lowtide.checkpoint(copy.deepcopy(model), x, budget="1GB")
    caplog.clear()
    for _ in range(2):
        for one in (model, planned):
            one.zero_grad()
            one(x).backward()
        pairs = zip(model.parameters(), planned.parameters(), strict=True)
        assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
    assert told(caplog) == []
