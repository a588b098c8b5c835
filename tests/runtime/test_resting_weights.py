"""Weights that rest on a store: training is eager's to the last bit, at the predicted peak, whatever the user
does with the weights in between."""

import copy
import errno
import gc
import io
import os

import pytest
import torch
from resting_plans import resting_plan
from torch import nn
from training import differences, measured_peak, snapshot, train, twin

import lowtide
from lowtide.errors import StoreError
from lowtide.offload.offload_store import resting_of
from lowtide.planning.planner import Planner
from lowtide.planning.variants import variants
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow

WIDTH, ROWS, LAYERS = 192, 64, 4
EVERYTHING = ("activations", "frozen", "parameters")


def mean_square(output):
    return output.square().mean()


def layers(*, frozen: bool) -> Target:
    """Half of the layers are frozen, with a trained bias before them."""
    torch.manual_seed(0)
    parts = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*parts, nn.Linear(WIDTH, WIDTH))
    for number in range(LAYERS) if frozen else ():
        model[2 * number].weight.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained)
    return Target("layers", model, torch.randn(ROWS, WIDTH), optimizer, mean_square)


def profiled(target, folder, *, what=EVERYTHING):
    return lowtide.profile(
        target.model,
        target.batch,
        optimizer=target.optimizer,
        loss=target.loss,
        offload=f"disk:{folder}",
        offload_what=what,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def half(folder):
    """A model with frozen weights, its profile, and the plan at its floor with all weights at rest."""
    target = layers(frozen=True)
    found = profiled(target, folder)
    return target, found, resting_plan(found)


@pytest.fixture
def planned(half):
    target, _, plan = half
    mine = twin(target)
    plan.apply(mine.model, optimizer=mine.optimizer)
    return mine


def rests(model, name="0.weight"):
    return resting_of(model.get_parameter(name)) is not None


def test_exact_at_the_predicted_peak_which_is_lower_by_the_weights(half, planned):
    target, found, plan = half
    assert differences(train(twin(target)), train(planned)) == []
    assert all(rests(planned.model, f"{2 * number}.weight") for number in range(LAYERS + 1))
    peak = measured_peak(planned)
    assert 0.995 * plan.peak_bytes <= peak <= plan.peak_bytes
    # of the weights, two are live at most: one that is read, and one whose gradient there is
    without = Planner(found.step, variants(found.step)).floor_bytes
    assert plan.peak_bytes <= without - (LAYERS - 1) * WIDTH * WIDTH * 4


def test_trained_weights_rest_between_their_uses(folder):
    target = layers(frozen=False)
    plan = resting_plan(profiled(target, folder))
    mine = twin(target)
    plan.apply(mine.model, optimizer=mine.optimizer)
    assert differences(train(twin(target)), train(mine)) == []
    assert all(rests(mine.model, f"{2 * number}.weight") for number in range(LAYERS + 1))
    assert 0.995 * plan.peak_bytes <= measured_peak(mine) <= plan.peak_bytes


def test_a_larger_budget_fetches_ahead_and_keeps_weights(half):
    target, found, plan = half
    roomy = resting_plan(found, budget_bytes=plan.peak_bytes + 3 * WIDTH * WIDTH * 4)
    first, more = plan.solution.offload, roomy.solution.offload
    assert more.stall_seconds < first.stall_seconds
    begun = [first - before for _, first, before in roomy.solution.graphs[0].fetches]
    assert max(begun) > 0
    mine = twin(target)
    roomy.apply(mine.model, optimizer=mine.optimizer)
    assert differences(train(twin(target)), train(mine)) == []
    assert measured_peak(mine) <= roomy.peak_bytes


def evaluates(target):
    target.model.eval()
    with torch.no_grad():
        found = target.model(target.batch).sum()
    target.model.train()
    return found


def saves(target):
    file = io.BytesIO()
    torch.save(target.model.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    assert all(torch.equal(state[name], value) for name, value in target.model.state_dict().items())


def loads(target):
    state = {name: value.clone() for name, value in target.model.state_dict().items()}
    target.model.load_state_dict({name: value * 0.5 for name, value in state.items()})


def loads_other_tensors(target):
    state = {name: value.clone() * 0.5 for name, value in target.model.state_dict().items()}
    target.model.load_state_dict(state, assign=True)
    target.optimizer.param_groups[0]["params"] = [p for p in target.model.parameters() if p.requires_grad]


def gives_other_memory(target):
    with torch.no_grad():
        target.model[2].weight.data = target.model[2].weight.data.clone() * 0.5


def writes_in_place(target):
    with torch.no_grad():
        target.model[2].weight.mul_(0.5)


def copies(target):
    other = copy.deepcopy(lowtide.remove(copy.deepcopy(target.model)))
    assert not rests(other) and torch.equal(other[0].weight, target.model[0].weight)


def raises_in_the_loss(target):
    with pytest.raises(ZeroDivisionError):
        1 / 0 * mean_square(target.model(target.batch))


def breaks_off_backward(target):
    value = mean_square(target.model(target.batch))
    value.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        value.backward()
    target.model.zero_grad()


def interrupt(_gradient):
    raise KeyboardInterrupt


def uses_a_weight_in_the_loss(target):
    (mean_square(target.model(target.batch)) + target.model[8].weight.abs().sum()).backward()
    target.optimizer.step()
    target.model.zero_grad()


def takes_another_shape(target):
    mean_square(target.model(target.batch[:16])).backward()
    target.optimizer.step()
    target.model.zero_grad()


def shares_a_weight(target):
    other = nn.Linear(WIDTH, WIDTH)
    other.weight = target.model[8].weight
    other(target.batch).square().mean().backward()
    target.optimizer.step()
    target.model.zero_grad()


BETWEEN = [
    *(evaluates, saves, loads, loads_other_tensors, gives_other_memory, writes_in_place, copies),
    *(raises_in_the_loss, breaks_off_backward, uses_a_weight_in_the_loss, takes_another_shape),
    shares_a_weight,
]


@pytest.mark.sample(5)
@pytest.mark.parametrize("between", BETWEEN, ids=lambda function: function.__name__)
def test_exact_whatever_comes_between_two_steps(half, planned, between):
    alone = twin(half[0])
    for each in (alone, planned):
        train(each, steps=1)
        torch.manual_seed(5)
        between(each)
    assert differences(train(alone), train(planned)) == []
    assert all(rests(planned.model, f"{2 * number}.weight") for number in range(LAYERS + 1))


def test_a_frozen_weight_is_unfrozen_and_another_frozen(half, planned):
    alone = twin(half[0])
    for each in (alone, planned):
        train(each, steps=1)
        each.model[0].weight.requires_grad_(True)
        each.model[8].weight.requires_grad_(False)
        each.optimizer.add_param_group({"params": [each.model[0].weight]})
    assert differences(train(alone), train(planned)) == []
    assert rests(planned.model)


def test_removed_weights_are_in_memory_and_their_slots_free(half, planned):
    train(planned, steps=1)
    before = snapshot(planned.model, 0)
    from lowtide.runtime.runner import runner_of

    store = runner_of(planned.model).backend.store
    lowtide.remove(planned.model)
    assert differences(before, snapshot(planned.model, 0)) == []
    assert not any(map(resting_of, planned.model.parameters()))
    gc.collect()
    end = store._file.slots.end
    assert store._file.slots.take(end) == 0


def test_a_full_disk_leaves_the_model_as_it_was(half, monkeypatch):
    target, _, plan = half
    mine = twin(target)
    before, write, count = snapshot(mine.model, 0), os.pwrite, iter(range(3))

    def fail(*args):
        if next(count, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*args)

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(StoreError, match="could not write"):
        plan.apply(mine.model, optimizer=mine.optimizer)
    assert not any(map(resting_of, mine.model.parameters()))
    assert differences(before, snapshot(mine.model, 0)) == []


def test_a_weight_with_a_view_elsewhere_does_not_rest(half):
    target, _, plan = half
    mine = twin(target)
    view = mine.model[2].weight.data[:3]
    with pytest.raises(StoreError, match=r"'2.weight' cannot rest .* another tensor shares its memory"):
        plan.apply(mine.model, optimizer=mine.optimizer)
    assert not any(map(resting_of, mine.model.parameters()))
    del view
    plan.apply(mine.model, optimizer=mine.optimizer)
    assert rests(mine.model)


@pytest.mark.sample(1)
@pytest.mark.parametrize("step_in_backward", [False, True])
def test_all_that_rests_is_exact_and_as_predicted_from_one_call(folder, step_in_backward):
    target = layers(frozen=True)
    mine, alone = twin(target), twin(target)
    options = {
        "optimizer": mine.optimizer,
        "loss": mine.loss,
        "step_in_backward": step_in_backward,
        "offload": f"disk:{folder}",
        "offload_what": ("activations", "state", "frozen", "parameters"),
    }
    found = lowtide.profile(mine.model, mine.batch, **options)
    lowtide.checkpoint(mine.model, mine.batch, budget=found.floor_bytes, **options)
    plan = lowtide.plan_of(mine.model)
    assert any(name.startswith("frozen:") for name in plan.solution.resting)
    assert plan.baseline_peak_bytes == found.peak_bytes and plan.peak_bytes <= 0.65 * found.peak_bytes
    for number in range(2):
        for each in (alone, mine):
            torch.manual_seed(number)
            mean_square(each.model(each.batch)).backward()
            each.optimizer.step()
            each.optimizer.zero_grad()
        assert differences(snapshot(alone.model, number), snapshot(mine.model, number)) == []
        states = [each.optimizer.state_dict()["state"] for each in (alone, mine)]
        for place, values in states[0].items():
            assert all(torch.equal(value, states[1][place][name]) for name, value in values.items())
    assert 0.99 * plan.peak_bytes <= measured_peak(mine) <= plan.peak_bytes
    assert plan.solution.floor_bound_bytes <= plan.peak_bytes
