"""`lowtide.verify` on an accelerator: in fresh processes that have the device for themselves."""

import gc
from collections.abc import Iterator

import pytest
import torch
from accelerator_cases import CASES, on
from torch import nn

import lowtide
from lowtide.generators import random_state
from lowtide.verification import fresh_process
from lowtide.verification.parked_tensors import parked
from lowtide.zoo.targets import Target


def _trained(target: Target) -> Target:
    """With optimizer state, and gradients of a further backward pass."""
    assert target.optimizer is not None
    for number in range(2):
        target.loss(target.model(*target.batch)).backward()
        if number == 0:
            target.optimizer.step()
            target.optimizer.zero_grad()
    return target


def _tensors(target: Target) -> Iterator[torch.Tensor]:
    assert target.optimizer is not None
    for parameter in target.model.parameters():
        yield parameter
        assert parameter.grad is not None
        yield parameter.grad
        yield from target.optimizer.state[parameter].values()
    yield from (*target.model.buffers(), *target.batch)


def test_a_parked_target_is_not_on_the_device_and_the_same_afterwards(device: torch.device) -> None:
    gc.collect()
    before = torch.accelerator.memory_allocated(device)
    target = _trained(on(CASES["cnn"](), device))
    tied = target.model[0].weight.detach().view(-1)
    tensors = list(_tensors(target))
    values, places = [tensor.detach().cpu() for tensor in tensors], [tensor.device for tensor in tensors]
    with pytest.raises(KeyboardInterrupt), parked({"source": target}):
        assert torch.accelerator.memory_allocated(device) <= before + 512
        assert torch.accelerator.memory_reserved(device) <= torch.accelerator.memory_allocated(device) + (
            2 << 20
        )
        raise KeyboardInterrupt
    assert list(map(id, _tensors(target))) == list(map(id, tensors))
    assert [tensor.device for tensor in tensors] == places
    assert all(torch.equal(tensor.cpu(), value) for tensor, value in zip(tensors, values, strict=True))
    assert tied.data_ptr() == target.model[0].weight.data_ptr()
    target.loss(target.model(*target.batch)).backward()


def test_what_does_not_fit_any_more_stays_on_the_host(device: torch.device, standin) -> None:
    target = on(CASES["mlp"](), device)
    value = target.model[0].weight.detach().cpu()
    with (
        pytest.raises(lowtide.LowtideError, match="they stay on the host, nothing is lost"),
        parked({"source": target}),
    ):
        standin.set_capacity(1 << 20, device)
    standin.set_capacity(None, device)
    assert torch.equal(target.model[0].weight.detach().cpu(), value)
    target.model.to(device)
    assert torch.equal(target.model[0].weight.detach().cpu(), value)


@pytest.mark.long
def test_the_device_is_free_while_a_plan_is_verified(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    before = torch.accelerator.memory_allocated(device)
    target = on(CASES["mlp"](), device)
    found = lowtide.profile(target.model, target.batch, optimizer=target.optimizer, loss=target.loss)
    plan = found.plan("70%")
    live: list[int] = []
    plain = fresh_process._wait

    def wait(*args: object) -> int:
        live.append(torch.accelerator.memory_allocated(device) - before)
        return plain(*args)

    monkeypatch.setattr(fresh_process, "_wait", wait)
    state = {name: value.cpu() for name, value in target.model.state_dict().items()}
    drawn = [random_state("cpu"), random_state(str(device))]
    result = lowtide.verify(
        target.model, target.batch, plan, optimizer=target.optimizer, loss=target.loss, timed_runs=0
    )
    assert result.exact and result.fits and result.fresh_process
    assert len(live) == 3 and max(live) <= 4096
    assert all(map(torch.equal, drawn, [random_state("cpu"), random_state(str(device))]))
    assert isinstance(target.model, nn.Module)
    assert all(torch.equal(value.cpu(), state[name]) for name, value in target.model.state_dict().items())
