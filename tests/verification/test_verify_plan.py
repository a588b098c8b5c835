"""The check itself: green where results are equal, red by name where they are not."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide.api import profile
from lowtide.errors import PlanMismatch
from lowtide.facts.serial import solution_to_dict
from lowtide.ops.calls import Call
from lowtide.plans import Plan
from lowtide.remat import batch_norm, replay
from lowtide.remat.dropout_mask import DropoutFromMask
from lowtide.runtime import backend, rewrite
from lowtide.verification import trained_steps
from lowtide.verification.comparison import Comparison, compare
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow

WIDTH = 32
ROWS = 128


class Trained(nn.Module):
    """Dropout, batch norm, and two parameters of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(4))
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = self.drop(F.gelu(norm(layer(x))))
        return x.square().mean()


def target(model: nn.Module) -> Target:
    torch.manual_seed(0)
    return Target("model", model, torch.randn(ROWS, WIDTH), torch.optim.Adam(model.parameters(), lr=1e-3))


@pytest.fixture(scope="module")
def planned() -> tuple[Target, Plan]:
    """A plan that runs all that can be run again."""
    source = target(Trained())
    found = profile(source.model, source.batch, optimizer=source.optimizer)
    return source, found.plan("1GB", planner="all")


def compared(planned: tuple[Target, Plan]) -> Comparison:
    model, batch, optimizer = copy.deepcopy((planned[0].model, planned[0].batch, planned[0].optimizer))
    source = Target("model", model, batch, optimizer)
    return compare(source=source, solution=solution_to_dict(planned[1].solution), timed_runs=0)


def test_equal_results_are_found_equal(planned: tuple[Target, Plan]) -> None:
    found = compared(planned)
    assert found.differences == () and found.recompute_exact and found.timings == {}
    assert {decision.method for decision in planned[1].decisions} >= {"mask", "again"}


@pytest.mark.long
def test_a_plan_made_under_autocast_is_verified_there() -> None:
    source = target(Trained())
    with torch.autocast("cpu", torch.bfloat16):
        found = profile(source.model, source.batch, optimizer=source.optimizer)
        plan = found.plan((found.peak_bytes + found.floor_bytes) // 2)
        result = lowtide.verify(source.model, source.batch, plan, optimizer=source.optimizer, timed_runs=1)
    assert result.exact and result.fresh_process and result.fits
    assert abs(result.measured_peak_bytes / plan.peak_bytes - 1) < 0.01
    with pytest.raises(PlanMismatch, match="such as autocast"):
        lowtide.verify(source.model, source.batch, plan, optimizer=source.optimizer, timed_runs=0)


@pytest.mark.parametrize("is_inside", [True, False])
def test_blocks_of_autocast_end_with_each_step_in_this_process_too(is_inside: bool) -> None:
    """A block inside of another one would keep its casts of weights that the step changes."""

    class Local(nn.Module):  # cannot be sent to another process
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=is_inside or torch.is_autocast_enabled("cpu")):
                return self.second(torch.relu(self.first(x))).float().square().mean()

    model, x = Local(), torch.randn(128, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu", torch.bfloat16, enabled=not is_inside):
        plan = profile(model, x, optimizer=optimizer).plan("100%")
        depth = torch.autocast_increment_nesting()
        torch.autocast_decrement_nesting()
        result = lowtide.verify(model, x, plan, optimizer=optimizer, timed_runs=0)
        assert (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()) == (depth, depth - 1)
        assert torch.is_autocast_enabled("cpu") is not is_inside
    assert not result.fresh_process and result.exact, result.differences


def _redraw(value: torch.Tensor, mask: torch.Tensor, probability: float) -> torch.Tensor:
    return value * torch.empty_like(value).bernoulli_(1 - probability) / (1 - probability)


def test_a_lost_dropout_mask_is_found(planned: tuple[Target, Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    lost = 0

    def redrawn(value: torch.Tensor, mask: torch.Tensor, probability: float) -> torch.Tensor:
        nonlocal lost
        lost += 1
        with torch.random.fork_rng():
            return _redraw(value, mask, probability)

    plain = DropoutFromMask.call

    def call(self: DropoutFromMask, node: Any, kept: Any) -> Call:
        return Call(redrawn, plain(self, node, kept).args)

    monkeypatch.setattr(DropoutFromMask, "call", call)
    found = compared(planned)
    assert lost
    assert found.differences[0].startswith("gradient of layers.")
    assert "step 1" in found.differences[0] and "values differ, by up to" in found.differences[0]


def test_a_replay_from_another_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x)) * torch.rand_like(x)
            return x.sum()

    source = target(Noisy())
    found = profile(source.model, source.batch, optimizer=source.optimizer)
    plan = found.plan("1GB", planner="all")
    assert compared((source, plan)).differences == ()
    monkeypatch.setattr(replay, "replay", lambda state, device, op, *args, **kwargs: op(*args, **kwargs))
    red = compared((source, plan))
    assert red.differences[0].startswith("gradient of layers.")
    assert any(words.startswith("random state") for words in red.differences)


def test_statistics_counted_twice_are_found(
    planned: tuple[Target, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[nn.Module] = []

    def twice(value: torch.Tensor, weight: Any, bias: Any, train: bool, momentum: float, eps: float) -> Any:
        with torch.no_grad():
            current[0].norms[0].running_mean.mul_(1 - momentum).add_(value.mean(0), alpha=momentum)
        return torch.ops.aten._native_batch_norm_legit.no_stats(value, weight, bias, train, momentum, eps)

    model, batch, optimizer = copy.deepcopy((planned[0].model, planned[0].batch, planned[0].optimizer))
    current.append(model)
    monkeypatch.setattr(batch_norm, "WITHOUT_STATISTICS", twice)
    found = compare(
        source=Target("model", model, batch, optimizer),
        solution=solution_to_dict(planned[1].solution),
        timed_runs=0,
    )
    assert found.differences[0].startswith("buffer norms.0.running_mean, step 1: 32 of 32 values differ")


def test_exchanged_gradients_are_found(planned: tuple[Target, Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = backend.rewrite

    def exchanged(segment: Any, schedule: Any, **options: Any) -> Any:
        graphs = plain(segment, schedule, **options)
        if tuple(schedule) == rewrite.baseline_schedule(segment):
            return graphs  # the graph without recompute that a plan is compared with
        output = graphs.backward.graph.output_node()
        grads = list(output.args[0])
        one, other = [i for i, g in enumerate(grads) if g is not None and _shape(g) == (WIDTH, WIDTH)][1:3]
        grads[one], grads[other] = grads[other], grads[one]
        output.args = (grads,)
        graphs.backward.recompile()
        return graphs

    monkeypatch.setattr(backend, "rewrite", exchanged)
    found = compared(planned)
    assert not found.recompute_exact
    assert found.differences[0].startswith("gradient of layers.1.weight, step 1")
    assert found.differences[1].startswith("gradient of layers.2.weight, step 1")


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


@torch.compiler.allow_in_graph
def _larger_while_traced(x: torch.Tensor) -> torch.Tensor:
    return x if type(x) is torch.Tensor else x * 1.0001


class OtherPath(nn.Module):
    """Code that finds out that it is being traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.first(x))
        return F.gelu(self.last(_larger_while_traced(x))).square().mean()


def test_where_eager_takes_another_path_the_plan_is_not_to_blame() -> None:
    source = target(OtherPath())
    plan = profile(source.model, source.batch, optimizer=source.optimizer).plan("1GB", planner="all")
    found = compared((source, plan))
    assert found.differences[0].startswith("loss, step 1: 1 of 1 values differ, by up to")
    assert found.recompute_exact


def test_in_a_fresh_process(planned: tuple[Target, Plan]) -> None:
    source, plan = planned
    before = copy.deepcopy(source.model.state_dict())
    state = torch.get_rng_state()
    found = lowtide.verify(source.model, source.batch, plan, optimizer=source.optimizer, timed_runs=1)
    assert found.exact and found.fresh_process and found.differences == () and found.recompute_exact
    assert found.measured_peak_bytes == pytest.approx(plan.peak_bytes, rel=0.01, abs=2048)
    assert found.measured_peak_bytes <= plan.budget_bytes and found.fits
    assert found.baseline_measured_peak_bytes > found.measured_peak_bytes
    assert found.step_seconds is not None and found.step_seconds > 0 and found.overhead is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, source.model.state_dict()[name]) for name, tensor in before.items())
    assert not source.optimizer.state


class Unpicklable(Trained):
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise pickle.PicklingError("not to be moved")

    def __deepcopy__(self, memo: dict[int, Any]) -> "Unpicklable":
        double = Unpicklable()
        double.load_state_dict(self.state_dict())
        for mine, others in zip(self.parameters(), double.parameters(), strict=True):
            memo[id(mine)] = others
        memo[id(self)] = double
        return double


def test_a_model_that_cannot_be_moved_is_verified_here() -> None:
    source = target(Unpicklable())
    plan = profile(source.model, source.batch, optimizer=source.optimizer).plan("1GB", planner="all")
    state = torch.get_rng_state()
    found = lowtide.verify(source.model, source.batch, plan, optimizer=source.optimizer, timed_runs=0)
    assert found.exact and not found.fresh_process
    assert found.resident_peak_bytes is None and found.step_seconds is None and found.overhead is None
    assert found.measured_peak_bytes == pytest.approx(plan.peak_bytes, rel=0.01, abs=2048)
    assert torch.equal(torch.get_rng_state(), state) and not source.optimizer.state


@pytest.mark.long
def test_eager_steps_that_are_timed_are_not_taken_for_a_plan_that_did_not_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = target(Unpicklable())
    plan = profile(source.model, source.batch, optimizer=source.optimizer).plan("1GB", planner="all")
    found = lowtide.verify(source.model, source.batch, plan, optimizer=source.optimizer, timed_runs=1)
    assert found.step_seconds is not None
    assert not [record for record in caplog.records if "got gradients" in record.getMessage()]


def test_a_plan_for_another_batch_is_refused(planned: tuple[Target, Plan]) -> None:
    source, plan = planned
    with pytest.raises(PlanMismatch, match=r"made for the batch .*\[128x32\].*here is .*\[7x32\]"):
        lowtide.verify(source.model, source.batch[:7], plan, optimizer=source.optimizer)


def test_a_plan_for_other_code_is_refused(planned: tuple[Target, Plan]) -> None:
    """The same class and parameters, but not the same graph."""
    source, plan = planned
    changed = copy.deepcopy(source.model)
    changed.drop = nn.Dropout(0.1)
    other = Target("model", changed, source.batch, torch.optim.Adam(changed.parameters()))
    with pytest.raises(PlanMismatch, match="another graph: the model's code or settings, such"):
        compare(source=other, solution=solution_to_dict(plan.solution), timed_runs=0)


def test_what_differs_is_told_in_words() -> None:
    ones = torch.ones(3)
    tell = trained_steps._difference
    assert tell(ones, ones.clone()) == ""
    assert tell(ones, torch.tensor([1, 1, 1.5])) == "1 of 3 values differ, by up to 0.5"
    assert tell(None, ones) == "is None without the plan" and tell(ones, None) == "is None with the plan"
    assert tell(ones, torch.ones(2)) == "torch.float32(2,) instead of torch.float32(3,)"
    assert tell(ones, ones.double()) == "torch.float64(3,) instead of torch.float32(3,)"
    nan = torch.tensor([1.0, float("nan")])
    assert tell(nan, nan.clone()) == "" and tell(nan, torch.ones(2)) != "" and tell(torch.ones(2), nan) != ""
