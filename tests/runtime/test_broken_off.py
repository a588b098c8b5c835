"""A step that ends early, by an exception or Ctrl-C: nothing is held, and the next one is eager's."""

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from storages import storage_bytes
from torch import fx, nn

import lowtide
from lowtide.runtime.apply import apply_plan
from lowtide.runtime.executor import EAGER_OPS, Function

pytestmark = pytest.mark.slow

WIDTH = 24


class Net(nn.Module):
    """Raises between its two halves for a value that only the batch tells, and returns what no loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.1))
            for _ in range(2)
        )
        self.picky = False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.halves[0](x)
        if self.picky and hidden.sum().item() > -1e9:
            raise ValueError("told to")
        hidden = self.halves[1](hidden)
        return hidden.square().sum(), hidden.mean(0)


class Interrupted:
    """Runs one of the passes op by op, and is interrupted before op `stop` of it."""

    name = "interrupted"
    in_place = True
    takes_numbers = True
    stop = -1

    def __init__(self, *, in_backward: bool = True) -> None:
        self.in_backward = in_backward

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], *, is_backward: bool) -> Function:
        if is_backward is not self.in_backward:
            return EAGER_OPS(module, inputs, is_backward=is_backward)

        def run(args: list[Any]) -> Any:
            given = list(args)
            args.clear()
            return _StopsAt(module, self.stop).run(*given)

        return run


class _StopsAt(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, stop: int) -> None:
        super().__init__(module)
        self.left = stop

    def call_function(self, *call: Any) -> Any:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return super().call_function(*call)


def batch() -> torch.Tensor:
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))


def loss_of(outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return outputs[0]


def results(model: nn.Module, loss: Callable[..., torch.Tensor] = loss_of) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    value = loss(model(batch()))
    value.backward()
    return [value.detach(), *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]


def pair(**options: Any) -> tuple[Net, Net]:
    torch.manual_seed(0)
    plain = Net()
    planned = copy.deepcopy(plain)
    found = lowtide.profile(planned, batch(), loss=loss_of)
    apply_plan(found.plan(found.floor_bytes), planned, **options)
    return plain, planned


@pytest.fixture(scope="module")
def shared() -> tuple[Net, Net]:
    return pair()


@pytest.fixture
def models(shared: tuple[Net, Net]) -> tuple[Net, Net]:
    shared[1].load_state_dict(shared[0].state_dict())
    return shared


def are_equal(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def test_an_exception_that_only_values_cause_is_the_users(models: tuple[Net, Net]) -> None:
    for model in models:
        model.picky = True
        for _ in range(2):
            torch.manual_seed(3)
            with pytest.raises(ValueError, match=r"^told to$"):
                model(batch())
        model.picky = False
    assert are_equal(*map(results, models))


def test_a_backward_pass_that_is_interrupted() -> None:
    executor = Interrupted()
    plain, planned = pair(executor=executor)
    results(plain), results(planned)
    planned.zero_grad(set_to_none=True)
    before = storage_bytes()
    for _ in range(3):
        executor.stop = 9
        with pytest.raises(KeyboardInterrupt):
            loss_of(planned(batch())).backward()
    executor.stop = -1
    assert storage_bytes() == before
    planned.load_state_dict(plain.state_dict())  # what forward counted, as in eager
    assert are_equal(results(plain), results(planned))


def test_a_gradient_hook_of_the_user_that_raises(models: tuple[Net, Net]) -> None:
    for model in models:
        handle = model.halves[0][0].weight.register_hook(lambda _gradient: 1 / 0)
        torch.manual_seed(3)
        with pytest.raises(ZeroDivisionError):
            loss_of(model(batch())).backward()
        handle.remove()
    assert are_equal(*map(results, models))


def test_a_loss_that_is_not_a_number_stays_one_and_goes_again(models: tuple[Net, Net]) -> None:
    for model in models:
        loss = loss_of(model(batch() * float("nan")))
        loss.backward()
        assert loss.isnan() and model.halves[0][0].weight.grad.isnan().all()
        model.halves.apply(lambda part: part.reset_running_stats() if hasattr(part, "running_mean") else None)
    assert are_equal(*map(results, models))


def test_calls_without_a_backward_pass_are_let_go_of() -> None:
    planned = pair()[1]
    planned(batch())
    before = storage_bytes()
    for _ in range(5):
        planned(batch())
    assert storage_bytes() <= before


def test_a_failed_call_is_no_first_call() -> None:
    """The next one can still be asked for gradients that no plan counts on."""
    executor = Interrupted(in_backward=False)
    plain, planned = pair(executor=executor)
    executor.stop = 4
    with pytest.raises(KeyboardInterrupt):
        planned(batch())
    executor.stop = -1
    planned.load_state_dict(plain.state_dict())

    def both(outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return outputs[0] + outputs[1].sum()

    assert are_equal(results(plain, both), results(planned, both))


def test_steps_in_backward_say_how_far_they_got(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = lowtide.profile(model, batch(), loss=loss_of, optimizer=optimizer, step_in_backward=True)
    executor = Interrupted()
    apply_plan(found.plan(found.floor_bytes), model, executor=executor, optimizer=optimizer)
    executor.stop = 30
    with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
        loss_of(model(batch())).backward()
    assert "parameters had been updated" in caplog.text
    executor.stop = -1
    for _ in range(2):
        loss_of(model(batch())).backward()
        optimizer.step()
        optimizer.zero_grad()
