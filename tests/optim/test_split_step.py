"""An optimizer's step in chunks leaves the same behind as its whole step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from training import Target, measured_peak, twin

import lowtide
from lowtide.analyze import optimizer_facts
from lowtide.optim import split_step
from lowtide.optim.split_check import check_split
from lowtide.optim.split_step import SplitStep, step_in_rows, take_step

SHAPES = [(37, 11), (5,), (), (64, 3, 3), (1, 7), (129,)]

BUILDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False, weight_decay=0.1),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    "fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01, foreach=True),
}


def trained(build: Callable[[Any], torch.optim.Optimizer], step: Callable[..., None]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = build([{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.003}])
    for _ in range(4):
        for parameter in parameters[:-1]:
            parameter.grad = torch.randn(parameter.shape)
        step(optimizer, parameters)
    states = [optimizer.state[parameter] for parameter in parameters]
    values = [value for state in states for _, value in sorted(state.items()) if value is not None]
    return [t.detach() for t in parameters] + [torch.as_tensor(value) for value in values]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", BUILDS)
def test_pieces_and_slices_leave_the_same_behind(name: str) -> None:
    build = BUILDS[name]
    whole = trained(build, lambda optimizer, _: optimizer.step())
    within_parameters = name != "fused"
    for chunk_bytes in (1, 100, 1000, 1 << 20):

        def take(
            optimizer: torch.optim.Optimizer, every: list[nn.Parameter], size: int = chunk_bytes
        ) -> None:
            take_step(optimizer, every, within_parameters=within_parameters, chunk_bytes=size)

        found = trained(build, take)
        assert same(whole, found), chunk_bytes

    def hooked(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        grads = [parameter.grad for parameter in parameters]
        steps = SplitStep([optimizer], within_parameters=within_parameters, chunk_bytes=100)
        steps.open()
        optimizer.step()
        steps.close()
        assert all(p.grad is grad for p, grad in zip(parameters, grads, strict=True))

    assert same(whole, trained(build, hooked))


def test_which_optimizers_can_be_cut() -> None:
    parameters = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    can = {name for name, build in BUILDS.items() if check_split(build(parameters)).within_parameters}
    # one that rounds the last few elements otherwise than those in vectors cannot be cut
    assert can >= set(BUILDS) - {"fused"}
    assert all(check_split(build(parameters)).by_parameter for build in BUILDS.values())
    factored = check_split(torch.optim.Adafactor(parameters))
    assert factored.by_parameter and not factored.within_parameters
    assert not check_split(torch.optim.LBFGS(parameters)).by_parameter


def test_rows_of_a_slice_are_written_to_the_state_of_the_whole() -> None:
    parameter = nn.Parameter(torch.randn(50, 4))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.randn(50, 4)
    step_in_rows(optimizer, parameter, 7)
    assert list(optimizer.state) == [parameter]
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], parameter.grad)


class Twice(torch.optim.SGD):
    """Not torch's own: nobody knows what it does with a closure."""

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            closure()
        return super().step(closure)


def test_a_closure_runs_before_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Lightning takes steps."""
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    steps = SplitStep([optimizer], within_parameters=True)
    steps.open()
    ran = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = parameter.sum()
        loss.backward()
        ran.append(loss)
        return loss

    taken: list[Any] = []
    own = split_step.take_step
    monkeypatch.setattr(
        split_step, "take_step", lambda *args, **kwargs: (taken.append(args), own(*args, **kwargs))
    )
    with torch.no_grad():
        for call in (lambda: optimizer.step(closure), lambda: optimizer.step(closure=closure)):
            assert call() is ran[-1]
    assert len(ran) == len(taken) == 2
    assert parameter.sum() == -16 and parameter.grad is not None


def test_other_closures_and_later_hooks_let_the_step_go_whole(caplog: pytest.LogCaptureFixture) -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = Twice([parameter], lr=1.0)
    steps = SplitStep([optimizer], within_parameters=True)
    steps.open()

    def closure() -> float:
        parameter.grad = torch.ones(4, 4)
        return 1.0

    assert optimizer.step(closure) == 1.0
    assert parameter.sum() == 0
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    later = SplitStep([optimizer], within_parameters=True)
    later.open()

    def double(*_: Any) -> None:
        parameter.grad.mul_(2)

    optimizer.register_step_pre_hook(double)
    optimizer.step()
    assert parameter.sum() == -32
    assert sum("step goes whole" in record.getMessage() for record in caplog.records) == 2


class Logged(torch.optim.Adam):
    """Its `super().step()` calls the hooks of the step once more."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_the_step_of_a_subclass_is_split_too() -> None:
    def hooked(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        grads = [parameter.grad for parameter in parameters]
        steps = SplitStep([optimizer], within_parameters=True, chunk_bytes=100)
        steps.open()
        optimizer.step()
        steps.close()
        assert all(p.grad is grad for p, grad in zip(parameters, grads, strict=True))

    whole = trained(lambda p: torch.optim.Adam(p, lr=0.01), lambda optimizer, _: optimizer.step())
    assert same(whole, trained(lambda p: Logged(p, lr=0.01), hooked))


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("foreach", [True, False])
def test_the_optimizers_temporaries_do_not_set_the_floor(
    monkeypatch: pytest.MonkeyPatch, foreach: bool
) -> None:
    sizes = tuple(1 << n for n in (20, 22, 24))
    monkeypatch.setattr(optimizer_facts, "CHUNK_SIZES", sizes)
    model = nn.Sequential(nn.Embedding(6000, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 1024))
    batch = torch.randint(0, 6000, (4,))
    optimizer = torch.optim.Adam(model.parameters(), foreach=foreach)
    target = Target("model", model, batch, optimizer)
    plain, planned = twin(target), twin(target)
    found = lowtide.profile(planned.model, batch, optimizer=planned.optimizer)
    assert found.floor_bytes < 0.85 * found.peak_bytes
    assert abs(measured_peak(plain) / found.peak_bytes - 1) < 0.01
    assert not found.plan("100%").solution.optimizer_in_chunks
    insides = [inside for _, inside in found.step.optimizer_chunks]
    assert [size for size, _ in found.step.optimizer_chunks] == list(sizes) and insides == sorted(insides)
    # a budget between what two sizes need takes the larger chunks that fit
    for (size, inside), more in zip(found.step.optimizer_chunks, (0, 1, 5000), strict=True):
        budget = found.floor_bytes + inside - insides[0] + more
        plan = found.plan(budget)
        assert plan.solution.optimizer_chunk_bytes == size
        plan.apply(planned.model)
        measured = measured_peak(planned)
        assert measured <= plan.budget_bytes and measured > 0.99 * plan.peak_bytes
        if size != sizes[0]:  # it was measured before
            measured_peak(plain)
        pairs = zip(plain.model.parameters(), planned.model.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    lowtide.remove(planned.model)
    assert not planned.optimizer._optimizer_step_pre_hooks
