"""The optimizer's part of a step: what it holds between steps and within one, against the real one."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.capture.step import capture
from lowtide.checking.peak import peak_above_start
from lowtide.checking.train_step import static_bytes
from lowtide.errors import CaptureError
from lowtide.facts import Kind, Region, Step
from lowtide.planning.schedules import reserve
from lowtide.profiling.costing import measure_costs

OPTIMIZERS = {
    "Adam": {},
    "AdamW": {"amsgrad": True},
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adagrad": {},
}
VARIANTS: dict[str, dict[str, bool]] = {
    "default": {},
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
CASES = [
    (name, variant)
    for name in OPTIMIZERS
    for variant in VARIANTS
    if not (variant == "fused" and name == "RMSprop")
]


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(60, 300), nn.Tanh(), nn.Linear(300, 70), nn.LayerNorm(70))


def make(name: str, variant: str, model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    options = {**OPTIMIZERS.get(name, {}), **VARIANTS[variant], **more}
    return getattr(torch.optim, name)(model.parameters(), lr=1e-3, **options)


def state_bytes(step: Step) -> int:
    return sum(s.nbytes for s in step.storages if s.kind is Kind.OPTIMIZER_STATE)


def measured(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """(state bytes, peak of a step above its start), after a first step, gradients there."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    peak = peak_above_start(optimizer.step)
    return static_bytes(nn.Module(), (), optimizer), peak


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant"), CASES)
def test_state_and_peak_are_those_of_a_real_step(name: str, variant: str) -> None:
    model = small()
    optimizer = make(name, variant, model)
    step, _ = measure_costs(capture(model, torch.randn(4, 60), optimizer=optimizer))
    state, peak = measured(model, optimizer)
    assert state_bytes(step) == state
    largest = max(p.nbytes for p in model.parameters())
    # the bytes are for the numbers of zero dimensions that python holds
    assert reserve(step).optimizer_peak_bytes == pytest.approx(peak, rel=0.01, abs=64)
    if variant == "fused":
        assert peak < largest / 10


def test_a_foreach_optimizer_holds_a_temporary_per_parameter() -> None:
    model = nn.Sequential(*(nn.Linear(60, 60) for _ in range(5)))
    largest, whole = 60 * 60 * 4, sum(p.nbytes for p in model.parameters())
    peaks = {}
    for variant in ("loop", "foreach"):
        step = capture(model, torch.randn(4, 60), optimizer=make("Adam", variant, model)).step
        peaks[variant] = reserve(step).optimizer_peak_bytes
    assert peaks["foreach"] >= whole
    assert peaks["loop"] < 3 * largest


def test_two_groups_and_a_parameter_without_gradient() -> None:
    model = small()
    model.register_parameter("unused", nn.Parameter(torch.ones(1000)))
    layers = list(model.children())
    groups = [
        {"params": layers[0].parameters()},
        {"params": [*layers[2].parameters(), model.unused], "lr": 0.1},
    ]
    optimizer = torch.optim.Adam(groups, lr=0.01)
    step = capture(model, torch.randn(4, 60), optimizer=optimizer).step
    trained = [*layers[0].parameters(), *layers[2].parameters()]
    assert state_bytes(step) == sum(2 * p.nbytes + 4 for p in trained)


def test_the_users_optimizer_is_untouched() -> None:
    model = small()
    optimizer = make("Adam", "foreach", model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    schedule.step()
    before, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    capture(model, torch.randn(4, 60), optimizer=optimizer)
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for index, values in before["state"].items():
        for name, value in values.items():
            assert torch.equal(value, after["state"][index][name])
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in weights.items())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]


def test_a_fresh_optimizer_stays_without_state() -> None:
    model = small()
    optimizer = make("Adam", "default", model)
    capture(model, torch.randn(4, 60), optimizer=optimizer)
    assert len(optimizer.state) == 0


def test_a_trained_optimizer_is_predicted_as_a_fresh_one() -> None:
    model = small()
    optimizer = make("SGD", "default", model)
    fresh = capture(model, torch.randn(4, 60), optimizer=optimizer).step
    measured(model, optimizer)
    assert capture(model, torch.randn(4, 60), optimizer=optimizer).step == fresh


def test_the_optimizer_comes_last_and_is_never_run_again() -> None:
    model = small()
    step = capture(model, torch.randn(4, 60), optimizer=make("AdamW", "default", model)).step
    ranks = [node.rank for node in step.nodes if node.region is Region.OPTIMIZER]
    assert ranks == list(range(ranks[0], len(step.nodes))) and len(ranks) > 3
    assert all(not step.nodes[rank].recipes for rank in ranks)


class Strange(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad.norm().item() > 0:
                parameter.data.sub_(parameter.grad)


@pytest.mark.parametrize("build", [torch.optim.LBFGS, torch.optim.SparseAdam, Strange])
def test_what_cannot_be_traced_is_refused_in_one_line(build: Any) -> None:
    model = small()
    optimizer = build(list(model.parameters()))
    with pytest.raises(CaptureError, match=rf"{type(optimizer).__name__}.*`optimizer=None`") as caught:
        capture(model, torch.randn(4, 60), optimizer=optimizer)
    assert "\n" not in str(caught.value)


def test_the_optimizer_of_another_model_is_refused() -> None:
    other = make("Adam", "default", small())
    with pytest.raises(CaptureError, match="6 of the optimizer's parameters do not belong to this model"):
        capture(small(), torch.randn(4, 60), optimizer=other)


class PassesOn(torch.optim.Optimizer):
    """As accelerate wraps an optimizer: whatever it is asked, it asks the other one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    param_groups = property(
        lambda self: self.optimizer.param_groups,
        lambda self, groups: setattr(self.optimizer, "param_groups", groups),
    )
    state = property(
        lambda self: self.optimizer.state, lambda self, state: setattr(self.optimizer, "state", state)
    )

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


class Slow(torch.optim.SGD):
    """An optimizer that does something of its own around another one."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters, lr=0.1)
        self.fast = torch.optim.Adam(parameters)


def test_a_wrapper_is_looked_through_and_left_alone() -> None:
    model = small()
    inner = make("Adam", "default", model)
    step = capture(model, torch.randn(4, 60), optimizer=PassesOn(inner)).step
    assert step == capture(model, torch.randn(4, 60), optimizer=inner).step
    assert [id(p) for p in inner.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert len(inner.state) == 0


def test_an_optimizer_around_another_one_is_refused() -> None:
    model = small()
    with pytest.raises(CaptureError, match="Slow works through another optimizer, Adam"):
        capture(model, torch.randn(4, 60), optimizer=Slow(model.parameters()))


def test_hooks_of_an_optimizer_are_not_called() -> None:
    model = small()
    optimizer = make("Adam", "default", model)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("must not be called"))
    optimizer.register_step_post_hook(lambda *_: pytest.fail("must not be called"))
    capture(model, torch.randn(4, 60), optimizer=optimizer)
