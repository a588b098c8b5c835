"""Parameters that are updated in the backward pass: eager's bits, less memory, refusals where needed."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from nets import said
from torch import nn
from torch.nn import functional as F
from training import measured_peak, twin

import lowtide
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow

ROWS, WIDTH = 24, 48


class Tied(nn.Module):
    """Layers, of which two share a weight, a dropout and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, 4 * WIDTH)
        self.second.weight = self.first.weight
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(F.gelu(self.first(x)))
        x = F.dropout(torch.relu(self.second(x)), 0.2)
        return self.last(x).square().mean()


Build = Callable[[Iterable[Any]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Build] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    "fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def target_with(build: Build, model: nn.Module | None = None) -> Target:
    torch.manual_seed(0)
    model = model or Tied()
    return Target("model", model, torch.randn(ROWS, WIDTH), build(model.parameters()))


def steps(target: Target, *, number: int = 3) -> list[torch.Tensor]:
    """Loss, parameters, buffers and optimizer state after each step of a plain loop."""
    torch.manual_seed(1)
    assert target.optimizer is not None
    schedule = torch.optim.lr_scheduler.StepLR(target.optimizer, 1, gamma=0.5)
    seen = []
    for _ in range(number):
        target.optimizer.zero_grad()
        loss = target.model(target.batch)
        loss.backward()
        target.optimizer.step()
        schedule.step()
        states = [target.optimizer.state[p] for p in target.model.parameters()]
        values = [v for state in states for v in state.values() if isinstance(v, torch.Tensor)]
        seen += [t.detach().clone() for t in (loss, *target.model.parameters(), *values)]
        seen += [buffer.clone() for buffer in target.model.buffers()]
    return seen


def planned(target: Target, **options: Any) -> lowtide.Plan:
    found = lowtide.profile(
        target.model, target.batch, optimizer=target.optimizer, step_in_backward=True, **options
    )
    plan = found.plan(found.floor_bytes)
    plan.apply(target.model)
    return plan


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name",
    ["adam", "foreach", "fused", "sgd", "adafactor", pytest.param("rmsprop", marks=pytest.mark.long)],
)
def test_training_has_eagers_bits(name: str) -> None:
    plain = target_with(OPTIMIZERS[name])
    other = twin(plain)
    planned(other)
    pairs = list(zip(steps(plain), steps(other), strict=True))
    assert all(torch.equal(one, two) for one, two in pairs) and len(pairs) > 20


def test_the_peak_is_lower_as_predicted() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    target = Target("model", model, torch.randn(8, 256), torch.optim.Adam(model.parameters()))
    without = lowtide.profile(model, target.batch, optimizer=target.optimizer)
    other = twin(target)
    plan = planned(other)
    weight_bytes = 256 * 256 * 4
    assert plan.peak_bytes < without.floor_bytes - 4 * weight_bytes
    assert plan.baseline_peak_bytes == without.peak_bytes
    measured = measured_peak(other)
    assert measured <= plan.peak_bytes and measured / plan.peak_bytes > 0.99


class InAutocast(nn.Module):
    """Casts its weights itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers:
                x = F.gelu(layer(x))
        return x.float().square().mean()


class Recurrent(nn.Module):
    """Its cells run a backward pass of their own inside of the graph's."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(WIDTH, WIDTH, num_layers=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cells(x)[0].square().mean()


@pytest.mark.sample(1)
@pytest.mark.parametrize("build", [InAutocast, Recurrent])
def test_weights_that_are_cast_and_cells_are_updated_in_the_pass(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain = target_with(OPTIMIZERS["adam"], build())
    other, another = twin(plain), twin(plain)
    plan = planned(other)
    assert measured_peak(other) <= plan.budget_bytes < measured_peak(plain)
    assert all(map(torch.equal, steps(plain), steps(other)))
    # beside a model with used gradients, whose tensors have no memory
    planned(another)
    assert all(map(torch.equal, steps(plain), steps(other)))
    steps(another)


def test_another_batch_shape_is_planned_the_same_way() -> None:
    plain = target_with(OPTIMIZERS["adam"])
    other = twin(plain)
    planned(other)
    smaller = torch.randn(ROWS - 5, WIDTH)
    plain, other = replace(plain, batch=smaller), replace(other, batch=smaller)
    assert all(torch.equal(one, two) for one, two in zip(steps(plain), steps(other), strict=True))
    other.optimizer.zero_grad()
    other.model(other.batch).backward()
    assert other.model.last.weight.grad is not None and "Used" in repr(other.model.last.weight.grad)


def test_a_plan_from_a_file_asks_for_the_optimizer(tmp_path) -> None:
    plain = target_with(OPTIMIZERS["adam"])
    other = twin(plain)
    planned(other).save(tmp_path / "plan.json")
    lowtide.remove(other.model)
    plan = lowtide.load_plan(tmp_path / "plan.json")
    with pytest.raises(lowtide.LowtideError, match="apply\\(model, optimizer="):
        plan.apply(other.model)
    plan.apply(other.model, optimizer=other.optimizer)
    assert all(torch.equal(one, two) for one, two in zip(steps(plain), steps(other), strict=True))


@pytest.mark.long
def test_verify_compares_what_is_left(tmp_path) -> None:
    target = target_with(OPTIMIZERS["adam"])
    plan = planned(target)
    found = lowtide.verify(target.model, target.batch, plan, optimizer=target.optimizer, timed_runs=0)
    assert found.exact and found.fits


def test_after_remove_gradients_stay() -> None:
    target = target_with(OPTIMIZERS["adam"])
    planned(target)
    lowtide.remove(target.model)
    target.model(target.batch).backward()
    assert target.model.last.weight.grad.norm() > 0
    assert not target.optimizer._optimizer_step_pre_hooks


def clip_norm(target: Target) -> None:
    torch.nn.utils.clip_grad_norm_(target.model.parameters(), 1.0)


def clip_value(target: Target) -> None:
    torch.nn.utils.clip_grad_value_(target.model.parameters(), 1.0)


def accumulate(target: Target) -> None:
    target.model(target.batch).backward()


def look(target: Target) -> None:
    target.model.last.weight.grad.norm()


def closure(target: Target) -> None:
    def again() -> torch.Tensor:
        loss = target.model(target.batch)
        loss.backward()
        return loss

    target.optimizer.step(again)


def test_a_closure_runs_its_backward_pass_before_the_step() -> None:
    """As Lightning takes steps."""
    plain = target_with(OPTIMIZERS["adam"])
    stepping = twin(plain)
    planned(stepping)
    found = []
    for target in (plain, stepping):
        torch.manual_seed(1)

        def step(target: Target = target) -> torch.Tensor:
            target.optimizer.zero_grad()
            loss = target.model(target.batch)
            loss.backward()
            return loss

        losses = [target.optimizer.step(step).detach() for _ in range(3)]
        found.append([*losses, *target.model.state_dict().values()])
    assert all(map(torch.equal, *found))


def test_a_model_moves_with_gradients_that_are_used() -> None:
    """As Lightning does with it in the end."""
    target = target_with(OPTIMIZERS["adam"])
    planned(target)
    target.model(target.batch).backward()
    target.optimizer.step()
    target.model.cpu().double()
    assert all(p.grad is None or p.grad.dtype is torch.float64 for p in target.model.parameters())
    target.model.zero_grad()


@pytest.mark.parametrize(
    "call", [clip_norm, pytest.param(clip_value, marks=pytest.mark.long), accumulate, look, closure]
)
def test_what_needs_the_gradients_is_refused_when_it_is_tried(call: Callable[[Target], None]) -> None:
    target = target_with(OPTIMIZERS["adam"])
    planned(target)
    target.model(target.batch).backward()
    with pytest.raises(lowtide.LowtideError, match="leave step_in_backward out"):
        call(target)


def set_rate(target: Target) -> None:
    target.optimizer.param_groups[0]["lr"] *= 0.5
    target.optimizer.step()


def step_twice(target: Target) -> None:
    target.optimizer.step()
    target.optimizer.step()


def zero_nothing(target: Target) -> None:
    target.optimizer.step()
    target.model(target.batch).backward()


def look_later(target: Target) -> None:
    target.optimizer.step()
    target.model.last.weight.grad.norm()


@pytest.mark.parametrize("call", [set_rate, step_twice, zero_nothing, look_later])
def test_loops_that_would_silently_get_other_parameters_are_refused(call: Callable[[Target], None]) -> None:
    target = target_with(OPTIMIZERS["sgd"])
    planned(target)
    target.model(target.batch).backward()
    with pytest.raises(lowtide.LowtideError, match=r"leave step_in_backward out"):
        call(target)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_zeroed_wherever_a_loop_does_it(
    set_to_none: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plain = target_with(OPTIMIZERS["foreach"])
    other = twin(plain)
    planned(other)
    for target in (plain, other):
        torch.manual_seed(1)
        for _ in range(3):
            target.optimizer.zero_grad(set_to_none=set_to_none)
            target.model(target.batch).backward()
            target.optimizer.step()
    pairs = zip(plain.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    assert not any("of gradients are there" in line for line in said(caplog))


def test_a_scaler_a_kept_graph_and_gradients_that_are_there_are_refused_before_anything_changes() -> None:
    target = target_with(OPTIMIZERS["adam"])
    planned(target)
    before = [parameter.detach().clone() for parameter in target.model.parameters()]
    loss = target.model(target.batch)
    with pytest.raises(lowtide.LowtideError, match="GradScaler"):
        torch.amp.GradScaler("cpu").scale(loss)
    off = torch.amp.GradScaler("cpu", enabled=False)
    assert off.scale(loss) is loss
    with pytest.raises(lowtide.LowtideError, match="retain_graph"):
        loss.backward(retain_graph=True)
    target.model.first.bias.grad = torch.zeros(WIDTH)
    with pytest.raises(lowtide.LowtideError, match=r"'first\.bias' has a gradient before"):
        target.model(target.batch).backward()
    target.optimizer.zero_grad()
    target.model.first.bias.register_hook(lambda grad: grad)
    with pytest.raises(lowtide.LowtideError, match="has a hook"):
        target.model(target.batch).backward()
    pairs = zip(before, target.model.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    lowtide.remove(target.model)
    assert torch.amp.GradScaler("cpu").scale(torch.ones(())) == 65536


class Together(torch.optim.SGD):
    """Scales by the norm of all gradients."""

    def step(self, closure: Any = None) -> None:
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.norm() for p in every)
        for p in every:
            p.data.sub_(p.grad / norm)


class Counting(torch.optim.SGD):
    """Counts its steps for the whole group."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.data.sub_(p.grad / group["count"])


class Choosing(torch.optim.SGD):
    """Branches on values of a gradient."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.isfinite().all():
                    p.data.sub_(p.grad)


def test_optimizers_that_choose_by_values_are_refused() -> None:
    model = Tied()
    with pytest.raises(
        lowtide.LowtideError, match=r"Choosing branches on values .*leave step_in_backward out"
    ):
        lowtide.profile(
            model, torch.randn(ROWS, WIDTH), optimizer=Choosing(model.parameters()), step_in_backward=True
        )


def test_optimizers_whose_parameters_depend_on_each_other_are_refused() -> None:
    model = Tied()
    batch = torch.randn(ROWS, WIDTH)
    builds: list[Build] = [Together, Counting, torch.optim.LBFGS]
    for build in builds:
        with pytest.raises(lowtide.LowtideError, match=r"[Ll]eave step_in_backward out"):
            lowtide.profile(model, batch, optimizer=build(model.parameters()), step_in_backward=True)
    with pytest.raises(lowtide.LowtideError, match="pass optimizer="):
        lowtide.profile(model, batch, step_in_backward=True)


class Broken(Tied):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(self.second(x)).sum()


def test_several_graphs_are_refused() -> None:
    with pytest.raises(lowtide.LowtideError, match="2 graphs"):
        planned(target_with(OPTIMIZERS["adam"], Broken()))
