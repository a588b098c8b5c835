"""Offloading to the host where steps do not end as planned, and beside other work: no race, no wrong bit."""

import gc
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from accelerator_cases import as_target, different, on, trained
from offload_plans import offload_plan
from torch import nn
from training import twin

import lowtide
from lowtide.offload.host_store import HostStore
from lowtide.plans import Plan
from lowtide.zoo.targets import Target

ROWS, WIDTH = 512, 128


def target_on(device: torch.device) -> Target:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return on(as_target(nn.Sequential(*layers), torch.randn(ROWS, WIDTH)), device)


def plan_for(target: Target) -> Plan:
    """A plan that offloads all it can."""
    known = twin(target)
    profile = lowtide.profile(
        known.model, known.batch, optimizer=known.optimizer, loss=known.loss, offload="host"
    )
    return offload_plan(profile, delay=2, ahead=2)


@pytest.fixture(scope="module")
def plan(device: torch.device) -> Plan:
    return plan_for(target_on(device))


@pytest.fixture
def lazily(standin: ModuleType) -> Iterator[ModuleType]:
    """Copies run only when somebody waits for them."""
    standin.set_lazy(True)
    yield standin
    assert standin.take_races() == []


def planned(target: Target, plan: Plan) -> Target:
    other = twin(target)
    plan.apply(other.model)
    return other


def write_everywhere(device: torch.device) -> None:
    """Take and write the blocks that are free now, as other ops would."""
    for _ in range(8):
        [torch.full((ROWS, WIDTH), 3.0, device=device) for _ in range(8)]


def test_a_value_that_is_dropped_while_it_is_written(lazily: ModuleType, device: torch.device) -> None:
    store = HostStore()
    handles = [store.offload(torch.full((ROWS, WIDTH), 2.0, device=device)) for _ in range(3)]
    host = handles[0].host
    del handles
    write_everywhere(device)
    torch.accelerator.synchronize(device)
    assert torch.equal(host.view(torch.float32), torch.full((ROWS * WIDTH,), 2.0))


def test_a_value_that_is_dropped_while_it_is_read(lazily: ModuleType, device: torch.device) -> None:
    store = HostStore()
    handle = store.offload(torch.ones(ROWS, WIDTH, device=device))
    handle.free_value()
    prefetch = handle.prefetch()
    del prefetch, handle
    write_everywhere(device)


def test_blocks_are_free_at_once_where_a_copy_was_waited_for(
    lazily: ModuleType, device: torch.device
) -> None:
    """The allocator keeps none of them for a stream: the same block comes back."""
    store = HostStore()
    value = torch.ones(ROWS, WIDTH, device=device)
    address = value.data_ptr()
    handle = store.offload(value)
    del value
    handle.free_value()
    assert torch.empty(ROWS, WIDTH, device=device).data_ptr() == address
    value = handle.prefetch().wait()
    address = value.data_ptr()
    del value
    assert torch.empty(ROWS, WIDTH, device=device).data_ptr() == address


def test_forward_passes_that_are_dropped(lazily: ModuleType, device: torch.device, plan: Plan) -> None:
    target = target_on(device)
    other = planned(target, plan)
    for _ in range(2):
        other.loss(other.model(*other.batch))
        write_everywhere(device)
    assert different(trained(twin(target)), trained(other)) == []


@pytest.mark.parametrize("in_backward", [False, True])
def test_steps_that_end_in_an_exception(
    in_backward: bool, lazily: ModuleType, device: torch.device, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the forward pass between a copy's start and its end, or in the backward pass between the two."""
    target = target_on(device)
    other = planned(target, plan)
    begins, fails = [], [True]
    name = "prefetch" if in_backward else "offload"
    owner = type(HostStore().offload(torch.ones(8, device=device))) if in_backward else HostStore
    real = getattr(owner, name)

    def failing(self: object, *value: torch.Tensor) -> object:
        begins.append(real(self, *value))
        if fails and len(begins) == 3:
            begins.clear()
            raise RuntimeError("stop here")
        return begins.pop() if not fails else begins[-1]

    monkeypatch.setattr(owner, name, failing)
    with pytest.raises(RuntimeError, match="stop here"):
        other.loss(other.model(*other.batch)).backward()
    fails.clear()
    begins.clear()
    other.optimizer.zero_grad()
    gc.collect()
    write_everywhere(device)
    assert different(trained(twin(target)), trained(other)) == []


def test_two_models_in_turn(lazily: ModuleType, device: torch.device, plan: Plan) -> None:
    target = target_on(device)
    one, two = planned(target, plan), planned(target, plan)
    for _ in range(2):
        losses = [each.loss(each.model(*each.batch)) for each in (one, two)]
        for loss in losses:
            loss.backward()
        for each in (one, two):
            each.optimizer.step()
            each.optimizer.zero_grad()
    eager = twin(target)
    trained(eager, steps=2)
    for each in (one, two):
        for mine, other in zip(each.model.parameters(), eager.model.parameters(), strict=True):
            assert torch.equal(mine, other)


def test_on_a_stream_of_the_user(lazily: ModuleType, device: torch.device, plan: Plan) -> None:
    target = target_on(device)
    other = planned(target, plan)
    stream = torch.Stream(device=device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        seen = trained(other)
    torch.accelerator.current_stream(device).wait_stream(stream)
    assert different(trained(twin(target)), seen) == []


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two devices")
def test_on_a_device_that_is_not_the_current_one(lazily: ModuleType, device: torch.device) -> None:
    second = torch.device(device.type, (device.index + 1) % torch.accelerator.device_count())
    target = target_on(second)
    other = planned(target, plan_for(target))
    assert torch.accelerator.current_device_index() == device.index
    assert different(trained(twin(target)), trained(other)) == []
