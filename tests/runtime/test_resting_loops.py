"""A loop whose optimizer's state rests on a store trains as eager does, within the planned peak."""

import copy
import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn
from training import differences, measured_peak, train, twin

import lowtide
from lowtide.errors import BudgetTooSmall, StoreError
from lowtide.offload.offload_store import resting_of
from lowtide.planning.planner import Planner
from lowtide.planning.resting_sets import resting_form
from lowtide.planning.schedules import eager_timeline
from lowtide.planning.simulate import simulate
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow

WIDTH = 640


def mean_square(output):
    return output.square().mean()


@pytest.fixture(scope="module")
def plain():
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(WIDTH, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Target("layers", model, torch.randn(256, WIDTH), optimizer, mean_square)


def profiled(target, folder, what=("activations", "state"), **settings):
    return lowtide.profile(
        target.model,
        target.batch,
        optimizer=target.optimizer,
        loss=target.loss,
        offload=f"disk:{folder}",
        offload_what=what,
        **settings,
    )


@pytest.fixture(scope="module")
def found(plain, tmp_path_factory):
    return profiled(plain, tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def in_backward(plain, tmp_path_factory):
    return profiled(plain, tmp_path_factory.mktemp("store"), step_in_backward=True)


def state_of(target):
    own = [target.optimizer.state[parameter] for parameter in target.model.parameters()]
    return [(key, value) for state in own for key, value in state.items()]


def is_same(one, other):
    pairs = zip(state_of(one), state_of(other), strict=True)
    return all(key == name and torch.equal(value, found) for (key, value), (name, found) in pairs)


def at_rest(target):
    return sum(resting_of(value) is not None for _, value in state_of(target))


@pytest.mark.sample(1)
@pytest.mark.parametrize("profile", ["found", "in_backward"])
def test_the_floor_without_state_is_reached_and_exact(profile, plain, request):
    profile = request.getfixturevalue(profile)
    state_bytes = sum(value.nbytes for _, value in state_of(trained(plain)) if value.nbytes >= 1 << 16)
    without = Planner(profile.step).floor_bytes
    assert profile.floor_bytes < without - state_bytes // 3
    plan = profile.plan(profile.floor_bytes)
    assert len(plan.solution.resting) == 4
    eager, planned = twin(plain), twin(plain)
    plan.apply(planned.model, optimizer=planned.optimizer)
    # a step in backward leaves no gradients to compare
    if not plan.solution.step_in_backward:
        assert not differences(train(eager), train(planned))
    torch.manual_seed(5)
    assert 0.999 * plan.peak_bytes <= measured_peak(planned) <= plan.peak_bytes <= plan.budget_bytes
    assert at_rest(planned) == 8
    if not plan.solution.step_in_backward:
        torch.manual_seed(5)
        measured_peak(eager)
        assert is_same(eager, planned)
    lowtide.remove(planned.model)
    assert at_rest(planned) == 0


def trained(plain):
    target = twin(plain)
    train(target, steps=1)
    return target


def steps(target, number, batch=None):
    torch.manual_seed(3)
    for _ in range(number):
        target.optimizer.zero_grad()
        mean_square(target.model(target.batch if batch is None else batch)).backward()
        target.optimizer.step()


def same_parameters(one, other):
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


def same_models(one, other):
    return same_parameters(one, other) and is_same(one, other)


def test_a_step_in_backward_is_exact(plain, in_backward):
    eager, planned = twin(plain), twin(plain)
    in_backward.plan(in_backward.floor_bytes).apply(planned.model, optimizer=planned.optimizer)
    steps(eager, 3), steps(planned, 3)
    assert same_models(eager, planned) and at_rest(planned) == 8


def test_what_fits_without_rests_nothing_and_a_larger_budget_is_never_slower(found):
    low, high = found.floor_bytes, found.peak_bytes
    plans = [found.plan(low + (high - low) * i // 6) for i in range(7)]
    assert plans[-1].solution.resting == () and plans[-1].solution.offload.resting_bytes == 0
    seconds = [plan.recompute_seconds for plan in plans]
    assert seconds == sorted(seconds, reverse=True)
    resting = [set(plan.solution.resting) for plan in plans]
    assert any(0 < len(names) < 4 for names in resting) and len(resting[0]) == 4
    for plan in plans:
        assert plan.lower_bound_seconds <= plan.recompute_seconds
        form = resting_form(found.step, plan.solution.resting)
        assert simulate(form, plan.solution.schedule.runs).peak_bytes <= plan.peak_bytes <= plan.budget_bytes
        assert eager_timeline(form).peak_bytes == found.peak_bytes == plan.baseline_peak_bytes
    with pytest.raises(BudgetTooSmall) as caught:
        found.plan(low - 1)
    assert caught.value.floor_bytes == low >= found.floor_bound_bytes


def test_a_plan_from_a_file_lets_the_same_state_rest(plain, found, tmp_path):
    """Beside a learning-rate schedule, another batch shape and an evaluation."""
    found.plan(found.floor_bytes).save(tmp_path / "plan.json")
    eager, planned = twin(plain), twin(plain)
    plan = lowtide.load_plan(tmp_path / "plan.json")
    plan.apply(planned.model, optimizer=planned.optimizer)
    for target in (eager, planned):
        schedule = torch.optim.lr_scheduler.StepLR(target.optimizer, 1, 0.5)
        steps(target, 2)
        schedule.step()
        steps(target, 1, target.batch[:100])
        target.model.eval()
        target.model(target.batch)
        target.model.train()
        steps(target, 1)
    assert same_models(eager, planned) and at_rest(planned) == 8


def test_the_state_of_parameters_that_a_checkpoint_replaces_rests(plain, found):
    eager, planned = twin(plain), twin(plain)
    found.plan(found.floor_bytes).apply(planned.model, optimizer=planned.optimizer)
    for target in (eager, planned):
        steps(target, 1)
        values = {name: value.clone() for name, value in target.model.state_dict().items()}
        target.model.load_state_dict(values, assign=True)
        target.optimizer.param_groups[0]["params"] = list(target.model.parameters())
        target.optimizer.state.clear()
        steps(target, 2)
    assert same_models(eager, planned) and at_rest(planned) == 8


def test_state_that_is_there_before_the_plan_and_two_optimizers(plain, tmp_path):
    def two(target):
        every = list(target.model.parameters())
        return replace(
            target,
            optimizer=[
                torch.optim.SGD(every[:4], lr=0.1, momentum=0.9),
                torch.optim.AdamW(every[4:], lr=1e-3, amsgrad=True),
            ],
        )

    eager, planned = two(twin(plain)), two(twin(plain))

    def train_both(number):
        for target in (eager, planned):
            torch.manual_seed(3)
            for _ in range(number):
                target.model.zero_grad()
                mean_square(target.model(target.batch)).backward()
                for optimizer in target.optimizer:
                    optimizer.step()

    def values(target):
        return [value for o in target.optimizer for s in o.state.values() for value in s.values()]

    train_both(1)
    profile = profiled(planned, tmp_path)
    profile.plan(profile.floor_bytes).apply(planned.model)
    assert sum(resting_of(value) is not None for value in values(planned)) == 2 + 6
    train_both(2)
    assert all(torch.equal(*pair) for pair in zip(values(eager), values(planned), strict=True))
    assert same_parameters(eager, planned)
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in planned.optimizer]
    for target in (eager, planned):
        for optimizer, state in zip(target.optimizer, saved, strict=True):
            optimizer.load_state_dict(copy.deepcopy(state))
    assert all(torch.equal(*pair) for pair in zip(values(eager), values(planned), strict=True))
    train_both(1)
    assert same_parameters(eager, planned)


def test_a_disk_without_room_is_found_when_the_plan_is_applied(plain, found, monkeypatch):
    planned = trained(plain)
    plan = found.plan(found.floor_bytes)
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(StoreError, match="are free"):
        plan.apply(planned.model, optimizer=planned.optimizer)
    assert at_rest(planned) == 0
    monkeypatch.undo()
    eager = trained(plain)
    steps(eager, 1), steps(planned, 1)
    assert same_models(eager, planned)


def test_the_words_say_what_rests(found):
    plan = found.plan(found.floor_bytes)
    offload = plan.solution.offload
    assert offload.resting_bytes == offload.read_bytes == offload.written_bytes == 8 * WIDTH * WIDTH * 4
    text = plan.summary()
    assert "state of 4 parameters" in text and "12.5 MiB" in text and "a step" in text


@pytest.mark.sample(1)
@pytest.mark.parametrize("step_in_backward", [False, True])
def test_parameters_rest_and_are_updated_in_chunks(plain, tmp_path, step_in_backward):
    what = ("activations", "state", "parameters")
    profile = profiled(plain, tmp_path, what, step_in_backward=step_in_backward)
    plan = profile.plan(profile.floor_bytes)
    assert (
        sorted(name.partition(":")[0] for name in plan.solution.resting) == ["parameters"] * 4 + ["state"] * 4
    )
    assert plan.baseline_peak_bytes == profile.peak_bytes == eager_timeline(plan.step).peak_bytes
    assert plan.lower_bound_seconds is None  # no bound covers which weights rest
    eager, planned = twin(plain), twin(plain)
    plan.apply(planned.model, optimizer=planned.optimizer)
    steps(eager, 3), steps(planned, 3)
    eager.optimizer.zero_grad(), planned.optimizer.zero_grad()
    assert same_models(eager, planned) and at_rest(planned) == 8
    assert sum(resting_of(p) is not None for p in planned.model.parameters()) == 4
    torch.manual_seed(5)
    assert 0.999 * plan.peak_bytes <= measured_peak(planned) <= plan.peak_bytes
    lowtide.remove(planned.model)
    torch.manual_seed(5)
    measured_peak(eager)
    assert same_models(eager, planned) and at_rest(planned) == 0
    assert not any(resting_of(p) is not None for p in planned.model.parameters())
