"""Where eager differs from itself, the plan is not to blame, and the op is named."""

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide.errors import CannotMoveToFreshProcess
from lowtide.experiments.contenders import Contender
from lowtide.experiments.trial import run_trial
from lowtide.facts.serial import solution_to_dict
from lowtide.ops.calls import Call
from lowtide.plans import Plan
from lowtide.remat.recompute import Recompute
from lowtide.report.results import Results
from lowtide.verification import verify_plan
from lowtide.verification.comparison import Comparison, compare
from lowtide.verification.repeated_ops import ops_that_differ
from lowtide.zoo.targets import Target

WIDTH, ROWS = 32, 128


@torch.library.custom_op("lowtide_tests::restless", mutates_args=())
def restless(x: torch.Tensor, always: bool) -> torch.Tensor:
    """Other last bits at every call, as with atomics; unless torch is deterministic, or `always`."""
    if torch.are_deterministic_algorithms_enabled() and not always:
        return x.clone()
    return x * (1 + 1e-4 * random.random())


@restless.register_fake
def _(x: torch.Tensor, always: bool) -> torch.Tensor:
    return torch.empty_like(x)


restless.register_autograd(lambda _, grad: (grad.clone(), None))


class Noisy(nn.Module):
    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.always = always

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = F.gelu(layer(x))
            if number == 2:
                x = restless(x, self.always)
        return x.square().mean()


class Experts(nn.Module):
    """Parameters that are read by indices that repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.up = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        made = F.gelu(torch.einsum("bd,bkdh->bkh", x, self.up[chosen]))
        return (made * weights[..., None]).square().mean()


def target(model: nn.Module) -> Target:
    torch.manual_seed(0)
    return Target("model", model, torch.randn(ROWS, WIDTH), torch.optim.Adam(model.parameters(), lr=1e-3))


def plan_of(source: Target) -> Plan:
    return lowtide.profile(source.model, source.batch, optimizer=source.optimizer).plan("1GB", planner="all")


def compared(source: Target, plan: Plan) -> Comparison:
    return compare(source=source, solution=solution_to_dict(plan.solution), timed_runs=0)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recompute doubles its values."""
    plain = Recompute.call

    def call(self: Any, node: Any, kept: Any) -> Call:
        made = plain(self, node, kept)
        return Call(lambda *args, **kwargs: made.target(*args, **kwargs) * 2, made.args, made.kwargs)

    monkeypatch.setattr(Recompute, "call", call)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("always", [False, True])
def test_the_plan_is_judged_against_eagers_own_differences(always: bool) -> None:
    source = target(Noisy(always))
    found = compared(source, plan_of(source))
    assert found.differences == () and found.recompute_exact
    assert any(words.startswith("gradient of layers.") for words in found.eager_differences)
    assert found.nondeterministic_ops == ("lowtide_tests.restless",)
    assert found.deterministic_with == ("" if always else "torch.use_deterministic_algorithms(True)")
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("always", [False, True])
def test_a_wrong_plan_is_found_where_eager_differs_from_itself(always: bool) -> None:
    source = target(Noisy(always))
    found = compared(source, plan_of(source))
    assert found.eager_differences
    assert any(words.startswith("gradient of layers.") for words in found.differences)


@pytest.mark.slow
def test_both_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_fresh(*_: object, **__: object) -> None:
        raise CannotMoveToFreshProcess("a process takes seconds", kind="")

    monkeypatch.setattr(verify_plan, "run_fresh", run_fresh)
    source = target(Noisy())
    found = lowtide.verify(
        source.model, source.batch, plan_of(source), optimizer=source.optimizer, timed_runs=0
    )
    assert found.exact and found.eager_differences
    assert "of eager from itself" in repr(found)
    text = found.summary()
    assert "to the last bit, compared with torch.use_deterministic_algorithms(True)" in text
    assert "eager training differs from itself in" in text and "lowtide_tests.restless" in text
    assert "switches that off" in text


@pytest.mark.long
@pytest.mark.slow
def test_the_users_settings_hold_in_fresh_processes() -> None:
    source = target(Noisy())
    plan = plan_of(source)
    torch.use_deterministic_algorithms(True)
    try:
        found = lowtide.verify(source.model, source.batch, plan, optimizer=source.optimizer, timed_runs=0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.exact and found.fresh_process and not found.eager_differences


@pytest.mark.slow
def test_gradients_added_up_in_any_order() -> None:
    source = target(Experts())
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = compared(source, plan_of(source))
    finally:
        torch.set_num_threads(threads)
    assert found.differences == ()
    if found.eager_differences:  # two threads may have taken turns by luck
        assert found.deterministic_with and set(found.nondeterministic_ops) <= {"aten.index_put"}


def test_ops_that_write_or_draw_are_not_taken_for_different() -> None:
    weight = nn.Parameter(torch.randn(64, 64))
    optimizer = torch.optim.Adam([weight], foreach=True)

    def step() -> None:
        made = F.dropout(torch.randn(32, 64) @ weight, 0.3)
        made.mul_(2).square().sum().backward()
        optimizer.step()

    assert ops_that_differ(step) == ()
    assert ops_that_differ(lambda: restless(weight, True)) == ("lowtide_tests.restless",)


def test_a_step_whose_ops_run_again_is_the_same_step() -> None:
    def seen(repeat: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        optimizer = torch.optim.Adam(layer.parameters())

        def step() -> None:
            layer(torch.randn(16, 8)).square().sum().backward()
            optimizer.step()

        ops_that_differ(step) if repeat else step()
        return [*layer.state_dict().values(), torch.get_rng_state()]

    assert all(torch.equal(one, other) for one, other in zip(seen(True), seen(False), strict=True))


@pytest.mark.slow
def test_methods_are_compared_as_far_as_eager_equals_itself() -> None:
    trial = run_trial(source=target(Noisy()), method=Contender(name="eager", kind="eager"), timed_runs=0)
    assert trial.eager_differs and trial.judgement == (Results.EXACT, "as far as eager equals itself")
