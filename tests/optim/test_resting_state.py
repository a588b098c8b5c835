"""Steps with state on a store leave the same behind as eager's, and take no memory for it."""

import copy
import errno
import io
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.errors import StoreError
from lowtide.offload.disk_store import DiskStore
from lowtide.offload.offload_store import resting_of
from lowtide.optim import resting_state
from lowtide.optim.chunk_buffers import limit_bytes, turns
from lowtide.optim.resting_state import RestingState
from lowtide.optim.resting_step import RestingStep
from lowtide.optim.split_check import check_split
from lowtide.optim.split_step import SplitStep

SHAPES = [(50, 20), (37, 11), (5,), (), (64, 3, 3, 3), (1, 7), (129,)]

BUILDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    "fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01, foreach=True),
}


@pytest.fixture(autouse=True)
def small_state_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resting_state, "LEAST_BYTES", 8)


class Trained:
    """An optimizer over a few parameters, and the gradients that it will get."""

    def __init__(self, build: Callable[[Any], Any], dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
        with torch.no_grad():
            self.parameters[4].data = self.parameters[4].data.to(memory_format=torch.channels_last)
        self.optimizer = build(
            [{"params": self.parameters[:3]}, {"params": self.parameters[3:], "lr": 0.003}]
        )
        self.generator = torch.Generator().manual_seed(1)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for parameter in self.parameters[:-1]:
                grad = torch.randn(parameter.shape, generator=self.generator)
                parameter.grad = torch.empty_like(parameter).copy_(grad)
            self.optimizer.step()

    @property
    def values(self) -> list[Any]:
        states = [self.optimizer.state[p] for p in self.parameters]
        return [p.detach() for p in self.parameters] + [dict(state) for state in states]


def rests(trained: Trained, folder: Any, *, chunk_bytes: int = 1000) -> SplitStep:
    names = {id(p): f"p{i}" for i, p in enumerate(trained.parameters)}
    resting = RestingStep(RestingState(DiskStore(str(folder)), names))
    within = check_split(trained.optimizer).within_parameters
    steps = SplitStep([trained.optimizer], within_parameters=within, chunk_bytes=chunk_bytes, resting=resting)
    steps.open()
    return steps


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.stride() == other.stride() and one.dtype == other.dtype
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def at_rest(trained: Trained) -> Iterator[bool]:
    for parameter in trained.parameters[:-1]:
        for value in trained.optimizer.state[parameter].values():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim():
                yield resting_of(value) is not None


@pytest.mark.parametrize("first", ["made", "there"])
@pytest.mark.parametrize("name", BUILDS)
def test_state_on_a_store_is_eagers(name: str, first: str, tmp_path: Any) -> None:
    """State that the first step makes, and state that is there before the plan; then a loaded checkpoint."""
    for chunk_bytes in (1, 1000, 1 << 20):
        eager, own = Trained(BUILDS[name]), Trained(BUILDS[name])
        if first == "there":
            eager.step(), own.step()
        steps = rests(own, tmp_path, chunk_bytes=chunk_bytes)
        eager.step(3), own.step(3)
        assert same(eager.values, own.values), chunk_bytes
        assert all(at_rest(own)) and (any(at_rest(own)) or name == "adafactor")
        steps.close()
        assert not any(at_rest(own)) and same(eager.values, own.values)
        assert not own.optimizer._optimizer_step_pre_hooks
        eager.step(), own.step()
        assert same(eager.values, own.values)


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_bfloat16_rests_as_it_is(name: str, tmp_path: Any) -> None:
    eager, own = (Trained(BUILDS[name], torch.bfloat16) for _ in range(2))
    rests(own, tmp_path)
    eager.step(3), own.step(3)
    assert same(eager.values, own.values) and all(at_rest(own))


def test_a_checkpoint_is_saved_and_loaded_as_in_eager(tmp_path: Any) -> None:
    eager, own = Trained(BUILDS["amsgrad"]), Trained(BUILDS["amsgrad"])
    rests(own, tmp_path)
    eager.step(2), own.step(2)
    files = [io.BytesIO(), io.BytesIO()]
    for trained, file in zip((eager, own), files, strict=True):
        torch.save(trained.optimizer.state_dict(), file)
    assert same(torch.load(io.BytesIO(files[0].getvalue())), torch.load(io.BytesIO(files[1].getvalue())))
    copied = copy.deepcopy(own.optimizer)
    eager.step(), own.step()
    assert all(resting_of(v) is None for state in copied.state.values() for v in state.values())
    for trained in (eager, own):
        trained.optimizer.load_state_dict(torch.load(io.BytesIO(files[1].getvalue())))
    assert all(at_rest(own))
    eager.step(), own.step()
    assert same(eager.values, own.values)


def test_state_that_the_loop_replaces_is_laid_to_rest_again(tmp_path: Any) -> None:
    eager, own = Trained(BUILDS["adam"]), Trained(BUILDS["adam"])
    rests(own, tmp_path)
    eager.step(2), own.step(2)
    for trained in (eager, own):
        weight, other, *_ = trained.parameters
        trained.optimizer.state[weight]["exp_avg"] = torch.ones_like(weight)
        trained.optimizer.state[other]["exp_avg_sq"].mul_(2)
        trained.optimizer.state[trained.parameters[4]].clear()
    eager.step(2), own.step(2)
    assert same(eager.values, own.values) and all(at_rest(own))


class Failing(torch.optim.Adam):
    """Raises in the middle of a step, once."""

    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if self.fails and any(
            p.shape == (37, 11) and p.grad is not None for g in self.param_groups for p in g["params"]
        ):
            self.fails = False
            raise KeyboardInterrupt
        return loss


def test_an_interrupted_step_leaves_what_eager_leaves(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    own = Trained(lambda p: Failing(p, lr=0.01))
    rests(own, tmp_path, chunk_bytes=1 << 11)
    own.step()
    own.optimizer.fails = True
    with pytest.raises(KeyboardInterrupt):
        own.step()
    assert "ended early" in caplog.text
    whole = Trained(BUILDS["adam"])
    whole.optimizer = torch.optim.Adam(
        [{"params": whole.parameters[:3]}, {"params": whole.parameters[3:], "lr": 0.003}], lr=0.01
    )
    whole.step(2)
    # the chunk that was interrupted is whole: its step was taken
    place = SHAPES.index((37, 11))
    ours, theirs = own.parameters[place], whole.parameters[place]
    assert torch.equal(ours, theirs)
    assert same(dict(own.optimizer.state[ours]), dict(whole.optimizer.state[theirs]))
    own.step()
    assert all(at_rest(own))


def test_a_torn_write_refuses_training_until_a_checkpoint_is_loaded(tmp_path: Any, monkeypatch: Any) -> None:
    eager, own = Trained(BUILDS["adam"]), Trained(BUILDS["adam"])
    rests(own, tmp_path)
    eager.step(), own.step()
    saved = [parameter.detach().clone() for parameter in own.parameters]
    checkpoint = copy.deepcopy(own.optimizer.state_dict())
    plain = os.pwrite

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreError, match="No space left"):
        own.step()
    monkeypatch.setattr(os, "pwrite", plain)
    with pytest.raises(StoreError, match="was not written whole"):
        own.step()
    with torch.no_grad():
        for parameter, value in zip(own.parameters, saved, strict=True):
            parameter.copy_(value)
    own.optimizer.load_state_dict(checkpoint)
    own.generator = torch.Generator().manual_seed(1)
    own.generator.set_state(eager.generator.get_state())
    eager.step(2), own.step(2)
    assert same(eager.values, own.values)


def test_a_step_that_goes_whole_is_eagers_too(tmp_path: Any) -> None:
    eager, own = Trained(BUILDS["adam"]), Trained(BUILDS["adam"])
    rests(own, tmp_path)

    def double(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in (p for g in optimizer.param_groups for p in g["params"] if p.grad is not None):
            parameter.grad.mul_(2)

    for trained in (eager, own):
        trained.optimizer.register_step_pre_hook(double)
    eager.step(3), own.step(3)
    assert same(eager.values, own.values) and all(at_rest(own))


def test_blocks_of_three_chunks_are_live_at_most() -> None:
    assert [turn.live_bytes for turn in turns([4, 4, 4, 4], limit=12)] == [8, 12, 12, 8]
    assert limit_bytes([4, 4, 4, 2], [2, 2, 2, 1], size=2) == 12
    # a parameter that cannot be cut is alone
    assert limit_bytes([4, 4, 90, 4], [2, 2, 45, 2], size=2) == 90
    found = turns([4, 4, 90, 4], limit=90)
    assert [turn.live_bytes for turn in found] == [8, 8, 90, 4]
    assert [turn.waits_for_write for turn in found] == [False, False, True, True]
    assert [turn.reads_next for turn in found] == [True, False, False, False]
    assert turns([], limit=0) == [] and [t.live_bytes for t in turns([0, 0], limit=0)] == [0, 0]
