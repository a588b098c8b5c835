"""The optimizer's part of a step: what it holds between steps and within one, against the real one."""

import copy
from typing import Any

import pytest
import torch
from nets import said
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformers.optimization import Adafactor

import lowtide
from lowtide.analyze.captured_step import capture
from lowtide.errors import CaptureError
from lowtide.facts import Kind, Region, Step
from lowtide.optim.shadow_optimizer import tensors_of
from lowtide.planning.schedules import reserve
from lowtide.profiling.costing import measure_costs
from lowtide.verification.measure_step import peak_above_start, static_bytes

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
    # on a CPU, the default of all of them is the loop
    pytest.param(name, variant, marks=pytest.mark.long if variant == "default" and name != "Adam" else ())
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


@pytest.mark.sample(8)
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
    assert all(not step.nodes[rank].remats for rank in ranks)


class Strange(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad.norm().item() > 0:
                parameter.data.sub_(parameter.grad)


def test_what_cannot_be_traced_is_refused_in_one_line() -> None:
    model = small()
    optimizer = torch.optim.SparseAdam(list(model.parameters()))
    with pytest.raises(CaptureError, match=r"SparseAdam.*`optimizer=None`") as caught:
        capture(model, torch.randn(4, 60), optimizer=optimizer)
    assert "\n" not in str(caught.value)


class Factored(torch.optim.Optimizer):
    """Makes its state and its temporaries by shape, not from its parameters; counts its steps in a tensor."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            rows, columns = parameter.shape
            state = self.state[parameter]
            if not state:
                state.update(rows=torch.zeros(rows), columns=torch.full((columns,), 0.1), step=torch.zeros(1))
            state["step"] += 1
            squares = parameter.grad.square()
            state["rows"].lerp_(squares.mean(1), 1 / state["step"].item())
            state["columns"].lerp_(squares.mean(0), 1 / state["step"].item())
            scale = torch.rsqrt(state["rows"][:, None] * state["columns"][None] + 1e-12)
            mask = torch.ones(parameter.shape, dtype=parameter.dtype)
            parameter.sub_(parameter.grad * scale * mask, alpha=1e-3)


@pytest.mark.slow
def test_state_and_temporaries_that_are_made_by_shape_count(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(60, 300, bias=False), nn.Tanh(), nn.Linear(300, 70, bias=False))
    optimizer = Factored(model.parameters())
    step, _ = measure_costs(capture(model, torch.randn(4, 60), optimizer=optimizer))
    state, peak = measured(model, optimizer)
    assert state_bytes(step) == state
    assert reserve(step).optimizer_peak_bytes == pytest.approx(peak, rel=0.01, abs=64)
    assert not said(caplog)


class Sharpness(torch.optim.Optimizer):
    """Steps up, evaluates again, and lets another optimizer step from where it was: needs a closure."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter in parameters:
            self.state[parameter]["before"] = parameter.clone()
            parameter.add_(parameter.grad, alpha=0.01)
        self.zero_grad()
        closure()
        for parameter in parameters:
            parameter.copy_(self.state[parameter]["before"])
        self.base.step()


class Average(torch.optim.Optimizer):
    """Keeps slow weights beside those of the optimizer that it holds."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base
        self.slow = [[p.detach().clone() for p in group["params"]] for group in base.param_groups]

    def step(self, closure: Any = None) -> None:
        self.base.step()
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for parameter, own in zip(group["params"], slow, strict=True):
                own.lerp_(parameter.detach(), 0.5)


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return sum(tensor.nbytes for tensor in tensors_of(optimizer) if id(tensor) not in own)


ESTIMATED = {
    "torch's Adafactor": (lambda model: torch.optim.Adafactor(model.parameters()), 0.01),
    "transformers' Adafactor": (lambda model: Adafactor(model.parameters()), 0.01),
    "reads values": (lambda model: Strange(model.parameters()), 0.01),
    "LBFGS": (lambda model: torch.optim.LBFGS(model.parameters(), history_size=5), 0.05),
    "needs a closure": (lambda model: Sharpness(model.parameters()), 0.01),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ESTIMATED)
def test_an_optimizer_that_reads_values_is_estimated_and_says_so(name: str, caplog: Any) -> None:
    model, batch = small(), torch.randn(4, 60)
    build, tolerance = ESTIMATED[name]
    optimizer = build(model)
    before = copy.deepcopy(optimizer.state_dict())
    step, _ = measure_costs(capture(model, batch, optimizer=optimizer))
    assert optimizer.state_dict() == before
    assert [note for note in step.notes if "are estimated" in note] and sum(
        "estimated" in w for w in said(caplog)
    ) == 1
    assert all(node.estimated for node in step.nodes if node.region is Region.OPTIMIZER)

    @torch.enable_grad()
    def evaluate() -> torch.Tensor:
        model.zero_grad()
        loss = model(batch).sin().sum()
        loss.backward()
        return loss

    closes = name in ("LBFGS", "needs a closure")

    def real_step() -> None:
        optimizer.step(evaluate) if closes else optimizer.step()

    evaluate()
    for _ in range(6):
        real_step()
    assert state_bytes(step) == pytest.approx(held_bytes(optimizer), rel=tolerance)
    if name == "LBFGS":
        return  # it frees blocks of earlier steps, which the measure does not see
    peak = peak_above_start(real_step)
    # what the closure itself takes is part of the forward and backward pass
    closure_bytes = peak_above_start(evaluate) if closes else 0
    assert reserve(step).optimizer_peak_bytes >= (peak - closure_bytes) * 0.99


@pytest.mark.slow
def test_what_an_optimizer_around_another_one_holds_is_counted() -> None:
    model = small()
    optimizer = Average(torch.optim.Adam(model.parameters()))
    slow = [id(tensor) for tensor in optimizer.slow[0]]
    step, _ = measure_costs(capture(model, torch.randn(4, 60), optimizer=optimizer))
    assert not step.notes
    assert [id(tensor) for tensor in optimizer.slow[0]] == slow and not optimizer.base.state
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert state_bytes(step) == held_bytes(optimizer)
    assert reserve(step).optimizer_peak_bytes == pytest.approx(
        peak_above_start(optimizer.step), rel=0.01, abs=64
    )


@pytest.mark.slow
@pytest.mark.long
def test_a_list_of_optimizers_is_planned_and_verified_as_one() -> None:
    model, batch = small(), torch.randn(64, 60)
    layers = list(model.children())
    optimizers = [
        torch.optim.Adam([*layers[0].parameters(), *layers[3].parameters()]),
        torch.optim.SGD(layers[2].parameters(), lr=0.1, momentum=0.9),
    ]
    found = lowtide.profile(model, batch, optimizer=optimizers)
    trained = [*layers[0].parameters(), *layers[3].parameters()]
    state = sum(2 * p.nbytes + 4 for p in trained) + sum(p.nbytes for p in layers[2].parameters())
    assert state_bytes(found.step) == state
    plan = found.plan(found.floor_bytes)
    result = lowtide.verify(model, batch, plan, optimizer=optimizers, timed_runs=0)
    assert result.exact and result.measured_peak_bytes <= plan.budget_bytes
    assert not any(optimizer.state for optimizer in optimizers)


def test_what_is_no_optimizer_is_refused_in_one_line() -> None:
    with pytest.raises(lowtide.LowtideError, match=r"the optimizer is a str: pass a torch.optim.Optimizer"):
        lowtide.profile(small(), torch.randn(4, 60), optimizer="adam")  # type: ignore[arg-type]


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


def test_a_wrapper_is_looked_through_and_left_alone() -> None:
    model = small()
    inner = make("Adam", "default", model)
    step = capture(model, torch.randn(4, 60), optimizer=PassesOn(inner)).step
    assert step == capture(model, torch.randn(4, 60), optimizer=inner).step
    assert [id(p) for p in inner.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert len(inner.state) == 0


class SharesAll(torch.optim.Adam):
    """A wrapper that is of the class of what it wraps and has its attributes, as Fabric makes them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.__dict__ = {**vars(optimizer), "optimizer": optimizer}

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def test_a_wrapper_calls_hooks_once_after_a_capture() -> None:
    model = small()
    inner = make("Adam", "default", model)
    optimizer, calls = SharesAll(inner), []
    inner.register_step_post_hook(lambda *_: calls.append("step"))
    capture(model, torch.randn(4, 60), optimizer=optimizer)
    model(torch.randn(4, 60)).sum().backward()
    optimizer.step()
    assert calls == ["step"]


def test_hooks_of_an_optimizer_are_not_called() -> None:
    model = small()
    optimizer = make("Adam", "default", model)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("must not be called"))
    optimizer.register_step_post_hook(lambda *_: pytest.fail("must not be called"))
    capture(model, torch.randn(4, 60), optimizer=optimizer)


def test_hooks_of_all_optimizers_are_not_called() -> None:
    """Neither while the step is traced nor while it is tried whether it can be split."""
    model = small()
    optimizer = make("Adam", "default", model)
    refuse = [
        register(lambda *_: pytest.fail("must not be called"))
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    ]
    try:
        lowtide.checkpoint(
            model, torch.randn(4, 60), budget="8MiB", optimizer=optimizer, step_in_backward=True
        )
    finally:
        for handle in refuse:
            handle.remove()
