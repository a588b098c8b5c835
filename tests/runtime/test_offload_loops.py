"""A loop that offloads trains as eager does, whatever else it does and whatever goes wrong in between."""

import errno
import gc
import os
from dataclasses import replace

import pytest
import torch
from offload_plans import offload_plan
from torch import nn
from training import differences, measured_peak, snapshot, train, twin

import lowtide
from lowtide.errors import StoreError
from lowtide.offload import disk_store
from lowtide.runtime.runner import runner_of
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow

ROWS, WIDTH = 256, 64


@pytest.fixture(scope="module")
def plain():
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2))]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.Adam(model.parameters())
    return Target("layers", model, torch.randn(ROWS, WIDTH), optimizer, mean_square)


@pytest.fixture(scope="module")
def plan(plain, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    found = lowtide.profile(
        plain.model, plain.batch, optimizer=plain.optimizer, loss=mean_square, offload=f"disk:{folder}"
    )
    return offload_plan(found, delay=1, ahead=2)


@pytest.fixture
def planned(plain, plan):
    target = twin(plain)
    plan.apply(target.model)
    return target


def mean_square(output):
    return output.square().mean()


def store_of(target):
    return runner_of(target.model).backend.store


def is_empty(store):
    """Whether nobody has a place in it."""
    gc.collect()
    slots = store._file.slots
    return slots.end == 0 or (slots.take(slots.end), slots.give_back(0, slots.end))[0] == 0


def after(target, loop):
    """What a loop leaves behind."""
    torch.manual_seed(3)
    loop(target)
    grads = [(name, None if p.grad is None else p.grad) for name, p in target.model.named_parameters()]
    return [*grads, *snapshot(target.model, 0), ("random state", torch.get_rng_state())]


def two_calls(target):
    losses = [mean_square(target.model(target.batch * scale)) for scale in (1, 2)]
    for loss in losses:
        loss.backward()


def backwards_twice(target):
    loss = mean_square(target.model(target.batch))
    loss.backward(retain_graph=True)
    loss.backward()


def with_evaluation(target):
    loss = mean_square(target.model(target.batch))
    with torch.no_grad():
        target.model(target.batch)
    target.model.eval()
    target.model(target.batch[:7]).sum().item()
    target.model.train()
    loss.backward()


def accumulating(target):
    for _ in range(2):
        mean_square(target.model(target.batch)).backward()
    target.optimizer.step()


def with_a_call_that_nobody_uses(target):
    target.model(target.batch)
    mean_square(target.model(target.batch)).backward()


def broken_off(target):
    loss = mean_square(target.model(target.batch))
    try:
        loss.register_hook(interrupt)
        loss.backward()
    except KeyboardInterrupt:
        target.model.zero_grad()
    del loss
    mean_square(target.model(target.batch)).backward()


def interrupt(_grad):
    raise KeyboardInterrupt


LOOPS = [broken_off, two_calls, backwards_twice, with_evaluation, accumulating, with_a_call_that_nobody_uses]


@pytest.mark.sample(4)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_is_exact_and_leaves_nothing_in_the_store(plain, planned, loop):
    assert differences(after(twin(plain), loop), after(planned, loop)) == []
    assert is_empty(store_of(planned))


@pytest.mark.parametrize(
    "options",
    [{"step_in_backward": True}, pytest.param({"accumulate": True}, marks=pytest.mark.long)],
    ids=str,
)
def test_other_levers_and_a_store_together(plain, tmp_path, options):
    one, other = twin(plain), twin(plain)
    found = lowtide.profile(
        other.model,
        other.batch,
        optimizer=other.optimizer,
        loss=mean_square,
        offload=f"disk:{tmp_path}",
        **options,
    )
    plan = offload_plan(found, delay=1, ahead=2)
    assert plan.solution.offload.store_bytes > 0
    plan.apply(other.model, optimizer=other.optimizer)

    def loop(target):
        for _ in range(3):
            for _ in range(2 if "accumulate" in options else 1):
                mean_square(target.model(target.batch)).backward()
            target.optimizer.step()
            target.optimizer.zero_grad()

    assert differences(after(one, loop), after(other, loop)) == []
    assert is_empty(store_of(other))


def test_a_plan_from_a_file_offloads(plain, plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    target = twin(plain)
    lowtide.load_plan(tmp_path / "plan.json").apply(target.model)
    assert differences(train(twin(plain)), train(target)) == []
    assert store_of(target).file_bytes >= plan.solution.offload.store_bytes


def test_other_batch_sizes_get_plans_of_their_own(plain, plan, planned):
    """Within the same budget, by what they offload and recompute."""
    for rows in (ROWS, ROWS // 2, ROWS - 3):
        smaller = replace(plain, batch=plain.batch[:rows])
        one, other = twin(smaller), replace(planned, batch=smaller.batch)
        other.model.load_state_dict(one.model.state_dict())
        other.optimizer.load_state_dict(one.optimizer.state_dict())
        assert differences(train(one), train(other)) == []
        assert measured_peak(other) <= plan.budget_bytes
    assert runner_of(planned.model).backend.num_graphs == 3


def test_a_larger_batch_offloads_though_the_planned_one_did_not(plain, plan):
    target = twin(replace(plain, batch=plain.batch[:8]))
    store = plan.solution.offload.transfer_speed.store
    lowtide.checkpoint(
        target.model,
        target.batch,
        budget=plan.budget_bytes,
        optimizer=target.optimizer,
        loss=mean_square,
        offload=store,
    )
    larger = replace(target, batch=plain.batch)
    assert differences(train(twin(plain)), train(larger)) == []
    assert measured_peak(larger) <= plan.budget_bytes


def test_a_full_disk_is_found_when_the_plan_is_applied(plain, plan):
    target = twin(plain)
    offload = replace(plan.solution.offload, store_bytes=1 << 60)
    with pytest.raises(StoreError, match=r"needs .* are free"):
        replace(plan, solution=replace(plan.solution, offload=offload)).apply(target.model)
    assert runner_of(target.model) is None
    assert differences(train(twin(plain)), train(target)) == []


def broken(*_):
    raise OSError(errno.EIO, "Input/output error")


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("owner", "name", "fault", "error", "match"),
    [
        (os, "pwrite", broken, StoreError, "could not write .*Input/output error"),
        (os, "fdatasync", broken, StoreError, "could not write .*Input/output error"),
        (os, "preadv", broken, StoreError, "could not read .*Input/output error"),
        (disk_store._DiskHandle, "free_value", interrupted, KeyboardInterrupt, None),
        (disk_store._DiskPrefetch, "wait", interrupted, KeyboardInterrupt, None),
    ],
    ids=["write", "sync", "read", "interrupted forward", "interrupted backward"],
)
def test_a_step_that_fails_is_named_and_the_next_one_works(
    plain, planned, monkeypatch, owner, name, fault, error, match
):
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fault)
        with pytest.raises(error, match=match):
            mean_square(planned.model(planned.batch)).backward()
    assert all(parameter.grad is None for parameter in planned.model.parameters())
    assert differences(train(twin(plain)), train(planned)) == []
    assert is_empty(store_of(planned))


def test_a_store_that_fails_late_leaves_no_value_behind(planned, monkeypatch):
    """What was on its way when the step failed holds neither memory nor a place."""
    store, calls = store_of(planned), []
    plain_write = os.pwrite

    def third_fails(*args):
        calls.append(args)
        return broken() if len(calls) == 3 else plain_write(*args)

    monkeypatch.setattr(os, "pwrite", third_fails)
    with pytest.raises(StoreError, match=store.text):
        planned.model(planned.batch)
    assert is_empty(store)


def steps_without_growth(planned, count):
    store = store_of(planned)
    train(planned, steps=3)
    gc.collect()
    before = store.file_bytes, store._file.slots.end, tensors()
    train(planned, steps=count)
    gc.collect()
    assert (store.file_bytes, store._file.slots.end, tensors()) == before


def tensors():
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_steps_take_no_more_memory_and_no_more_disk(planned):
    steps_without_growth(planned, 20)


@pytest.mark.long
def test_five_hundred_steps_take_no_more(planned):
    steps_without_growth(planned, 500)


def test_a_plan_that_is_removed_lets_its_file_go(plain, planned):
    loss = mean_square(planned.model(planned.batch))
    number = store_of(planned)._file.file.fileno()
    lowtide.remove(planned.model)
    loss.backward()  # what was on the store by then can still be read
    del loss
    planned.model.zero_grad()
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(number)
    assert differences(train(twin(plain)), train(planned)) == []


def test_hooks_that_copy_what_is_saved_are_refused(planned):
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        loss = mean_square(planned.model(planned.batch))
    with pytest.raises(StoreError, match="saved-tensor hooks"):
        loss.backward()
