"""Loops around steps in backward: they train as in eager, or are refused before anything has changed."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import said
from torch import Tensor, nn

import lowtide

pytestmark = pytest.mark.slow

ROWS, WIDTH = 24, 16
Build = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def batch(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


class Loop:
    """A model, its optimizer, and the values of the parameters when they were planned."""

    def __init__(self, build: Build = sgd) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.optimizer = build(self.model.parameters())

    def plan(self, *, budget: Any = "1GiB") -> "Loop":
        found = lowtide.profile(
            self.model, batch(), optimizer=self.optimizer, loss=square, step_in_backward=True
        )
        found.plan(found.floor_bytes if budget == "floor" else budget).apply(self.model)
        return self

    def step(self, rows: int = ROWS) -> None:
        square(self.model(batch(rows))).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> list[Tensor]:
        states = [v for p in self.model.parameters() for v in self.optimizer.state.get(p, {}).values()]
        tensors = [*self.model.parameters(), *(s for s in states if isinstance(s, Tensor))]
        return [tensor.detach().clone() for tensor in tensors]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def both(run: Callable[[Loop], Any], build: Build = sgd, *, budget: Any = "floor") -> bool:
    """Whether a loop gives a planned model eager's results, parameters and state."""
    results = []
    for loop in (Loop(build), Loop(build).plan(budget=budget)):
        results.append([[run(loop) or [], loop.values()] for _ in range(3)])
    eager, planned = results
    return all(
        equal(one[0], other[0]) and equal(one[1], other[1]) for one, other in zip(eager, planned, strict=True)
    )


# passes that update nothing


def saliency(loop: Loop) -> list[Tensor]:
    loop.model.eval()
    inputs = batch().requires_grad_()
    found = torch.autograd.grad(square(loop.model(inputs)), inputs)
    loop.model.train()
    loop.step()
    return list(found)


def saliency_in_training(loop: Loop) -> list[Tensor]:
    inputs = batch().requires_grad_()
    found = torch.autograd.grad(square(loop.model(inputs)), inputs)
    loop.step()
    return list(found)


def gradients_of_parameters(loop: Loop) -> list[Tensor]:
    parameters = list(loop.model.parameters())
    found = torch.autograd.grad(square(loop.model(batch())), parameters)
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return list(found)


def gradient_of_inputs_alone(loop: Loop) -> list[Tensor]:
    inputs = batch().requires_grad_()
    square(loop.model(inputs)).backward(inputs=[inputs])
    loop.step()
    assert inputs.grad is not None
    return [inputs.grad]


def gradient_of_one_parameter(loop: Loop) -> None:
    square(loop.model(batch())).backward(inputs=[loop.model[2].weight])
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def training_in_eval_mode(loop: Loop) -> list[Tensor]:
    loop.model.eval()
    square(loop.model(batch())).backward()
    found = [parameter.grad for parameter in loop.model.parameters() if parameter.grad is not None]
    found = [gradient.clone() for gradient in found]
    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    loop.model.train()
    loop.step()
    return found


def adversarial_inputs(loop: Loop) -> None:
    """Two passes: one for a disturbance of the inputs, one to train."""
    inputs = batch().requires_grad_()
    (gradient,) = torch.autograd.grad(square(loop.model(inputs)), inputs, retain_graph=True)
    square(loop.model(batch() + 0.1 * gradient.sign())).backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def zeroed_after_forward(loop: Loop) -> None:
    for rows in (ROWS, ROWS - 5):
        loss = square(loop.model(batch(rows)))
        loop.optimizer.zero_grad()
        loss.backward()
        loop.optimizer.step()
    loop.optimizer.zero_grad()


def zeroed_in_place(loop: Loop) -> None:
    for rows in (ROWS, ROWS - 5):
        loop.optimizer.zero_grad(set_to_none=False)
        square(loop.model(batch(rows))).backward()
        loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=False)


def trained_around_a_metric(loop: Loop) -> list[Tensor]:
    before = loop.model[0].weight.detach().clone()
    loop.step()
    with torch.no_grad():
        return [loop.model(batch()), loop.model[0].weight - before]


@pytest.mark.sample(6)
@pytest.mark.parametrize("budget", [pytest.param("1GiB", marks=pytest.mark.long), "floor"])
@pytest.mark.parametrize(
    "run",
    [
        saliency,
        saliency_in_training,
        gradients_of_parameters,
        gradient_of_inputs_alone,
        gradient_of_one_parameter,
        training_in_eval_mode,
        adversarial_inputs,
        zeroed_after_forward,
        zeroed_in_place,
        trained_around_a_metric,
    ],
)
def test_loops_train_as_in_eager(run: Callable[[Loop], Any], budget: str) -> None:
    assert both(run, budget=budget)


def test_gradients_that_stay_in_eval_mode_are_said_with_their_bytes(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop().plan(budget="floor")
    loop.model.eval()
    loop.step()
    assert any("backward() in eval mode leaves 2.1 KiB of gradients" in line for line in said(caplog))


# passes and code that are refused


def two_calls(loop: Loop) -> None:
    (square(loop.model(batch())) + square(loop.model(batch() + 1))).backward()


def two_calls_two_passes(loop: Loop) -> None:
    first, second = square(loop.model(batch())), square(loop.model(batch() + 1))
    first.backward()
    second.backward()


def penalty(loop: Loop) -> None:
    norms = sum(parameter.square().sum() for parameter in loop.model.parameters())
    (square(loop.model(batch())) + 0.01 * norms).backward()


def kept_graph(loop: Loop) -> None:
    square(loop.model(batch())).backward(retain_graph=True)


def accumulation(loop: Loop) -> None:
    square(loop.model(batch())).backward()
    square(loop.model(batch())).backward()


def between(act: Callable[[Loop], Any]) -> Callable[[Loop], None]:
    def run(loop: Loop) -> None:
        square(loop.model(batch())).backward()
        with torch.no_grad():
            act(loop)
        loop.optimizer.step()

    return run


def skipped(loop: Loop) -> None:
    square(loop.model(batch())).backward()
    loop.optimizer.zero_grad()
    loop.step()


def average(loop: Loop) -> None:
    torch.zeros(WIDTH, WIDTH).lerp_(loop.model[0].weight, 0.1)


def clipped_values(loop: Loop) -> None:
    torch._foreach_clamp_max_(list(loop.model.parameters()), 0.1)


def read_before_step(loop: Loop) -> None:
    """A hook that is registered after the plan was applied."""
    loop.optimizer.register_step_pre_hook(lambda *_: loop.model[0].weight.norm())
    loop.step()


def read_before_closure(loop: Loop) -> None:
    loop.optimizer.register_step_pre_hook(lambda *_: loop.model[0].weight.norm())
    loop.optimizer.step(lambda: square(loop.model(batch())).backward())


def changed_by_a_view(loop: Loop) -> None:
    view = loop.model[0].weight.detach()
    square(loop.model(batch())).backward()
    view.mul_(0.9)
    loop.optimizer.step()


REFUSED: dict[str, tuple[Callable[[Loop], None], str]] = {
    "two calls": (two_calls, "one backward\\(\\) for 2 calls"),
    "two calls, two passes": (two_calls_two_passes, "second backward pass before optimizer.step"),
    "penalty": (penalty, "uses '0.weight' outside of the model too"),
    "kept graph": (kept_graph, "retain_graph"),
    "accumulation": (accumulation, "called between backward\\(\\) and optimizer.step"),
    "skipped step": (skipped, "called between backward\\(\\) and optimizer.step"),
    "decay": (between(lambda loop: [p.mul_(0.9) for p in loop.model.parameters()]), "mul_ reads or changes"),
    "data": (between(lambda loop: loop.model[0].weight.data.mul_(0.9)), "data reads or changes '0.weight'"),
    "new data": (between(lambda loop: setattr(loop.model[0].weight, "data", batch())), "data reads"),
    "initialized": (between(lambda loop: nn.init.zeros_(loop.model[0].weight)), "zero_ reads"),
    "update ratio": (between(lambda loop: loop.model[0].weight.clone()), "clone reads or changes"),
    "average": (between(average), "lerp_ reads or changes '0.weight'"),
    "clipped values": (between(clipped_values), "_foreach_clamp_max_ reads or changes '0.weight'"),
    "saved": (between(lambda loop: loop.model.state_dict()), "detach reads"),
    "saved state": (between(lambda loop: loop.optimizer.state_dict()), "state_dict\\(\\) is called between"),
    "copied": (between(lambda loop: copy.deepcopy(loop.model)), "reads or changes '0.weight'"),
    "evaluated": (between(lambda loop: loop.model(batch())), "called between"),
    "part evaluated": (between(lambda loop: loop.model[0](batch())), "linear reads"),
    "zeroed": (between(lambda loop: loop.optimizer.zero_grad()), "was removed or replaced"),
    "zeroed in place": (between(lambda loop: loop.optimizer.zero_grad(False)), "was removed or replaced"),
    "gradient": (between(lambda loop: loop.model[0].weight.grad.norm()), "reads a gradient"),
    "hook": (read_before_step, "reads or changes '0.weight'"),
    "hook and closure": (read_before_closure, "register the hook before"),
    "view": (changed_by_a_view, "'0.weight' changed between"),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", REFUSED)
def test_other_loops_are_refused_before_anything_changes(name: str) -> None:
    run, reason = REFUSED[name]
    loop = Loop().plan()
    before = loop.values()
    with pytest.raises(lowtide.LowtideError, match=reason) as caught:
        run(loop)
    assert "leave step_in_backward out" in str(caught.value) and "\n" not in str(caught.value)
    if name == "view":
        before[0] *= 0.9
    assert equal(before, loop.values())


def test_a_refused_trial_leaves_eagers_gradients() -> None:
    eager, loop = Loop(), Loop().plan()
    square(eager.model(batch())).backward()
    with pytest.raises(lowtide.LowtideError, match="mul_ reads or changes"):
        REFUSED["decay"][0](loop)
    pairs = zip(eager.model.parameters(), loop.model.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
    for each in (eager, loop):
        each.optimizer.step()
    assert equal(eager.values(), loop.values())


@pytest.mark.parametrize("name", ["decay", "update ratio", "evaluated", "skipped step", "average", "view"])
def test_where_the_first_step_is_no_trial_they_are_refused_too(name: str) -> None:
    run, reason = REFUSED[name]
    loop = Loop().plan(budget="floor")
    with pytest.raises(lowtide.LowtideError, match=reason):
        run(loop)


def test_passes_that_share_are_refused_in_any_step_before_anything_changes() -> None:
    for name in ("two calls", "penalty", "kept graph"):
        run, reason = REFUSED[name]
        loop = Loop().plan(budget="floor")
        loop.step()
        before = loop.values()
        with pytest.raises(lowtide.LowtideError, match=reason):
            run(loop)
        assert equal(before, loop.values())
        loop.optimizer.zero_grad()
        loop.step()


def test_layouts_of_updated_parameters_can_be_read() -> None:
    loop = Loop().plan(budget="floor")
    square(loop.model(batch())).backward()
    weight = loop.model[0].weight
    assert isinstance(weight, nn.Parameter) and weight.requires_grad and weight.is_leaf
    assert (weight.numel(), weight.shape, len(weight)) == (WIDTH * WIDTH, (WIDTH, WIDTH), WIDTH)
    assert {weight: 1}[weight] == 1 and "0.weight" in repr(weight)
    loop.optimizer.step()
    assert type(weight) is nn.Parameter and "_lowtide_guard" not in vars(weight)
    loop.optimizer.zero_grad()
    square(loop.model(batch())).backward()
    lowtide.remove(loop.model)
    assert type(weight) is nn.Parameter and weight.clone() is not None


def test_a_failure_behind_the_updates_is_said(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop().plan(budget="floor")

    def fail(_: Tensor) -> None:
        raise ValueError("told to")

    inputs = batch().requires_grad_()
    doubled = inputs * 2
    doubled.register_hook(fail)
    with caplog.at_level(logging.WARNING, "lowtide"), pytest.raises(ValueError, match="told to"):
        square(loop.model(doubled)).backward()
    assert any("the backward pass ended early, when 4 of 4 parameters" in line for line in said(caplog))
    assert type(loop.model[0].weight) is nn.Parameter


def test_a_hook_before_the_step_that_reads_no_parameter_may_come_later() -> None:
    seen = []

    def run(loop: Loop) -> None:
        handle = loop.optimizer.register_step_pre_hook(lambda *_: seen.append(1))
        loop.step()
        handle.remove()

    assert both(run) and seen


def test_parameters_outside_of_the_model_train_beside_it() -> None:
    heads = []

    def run(loop: Loop) -> list[Tensor]:
        if not heads or heads[-1][0] is not loop:
            torch.manual_seed(2)
            head = nn.Linear(WIDTH, 1)
            heads.append((loop, head, torch.optim.SGD(head.parameters(), lr=0.1)))
        _, head, optimizer = heads[-1]
        square(head(loop.model(batch())) + head(batch())).backward()
        loop.optimizer.step()
        optimizer.step()
        loop.optimizer.zero_grad()
        optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in head.parameters()]

    assert both(run)
