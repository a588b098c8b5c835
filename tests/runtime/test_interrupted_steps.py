"""Ctrl-C at any line of a step whose state and weights rest: the optimizer stays whole, and a loop that loads
its checkpoint goes on as eager does."""

import copy
import errno
import inspect
import os

import pytest
import torch
from interrupts import Lines
from torch import nn

import lowtide
from lowtide.analyze import optimizer_facts
from lowtide.errors import StoreError, Unsupported
from lowtide.offload.offload_store import resting_of
from lowtide.optim import split_check, split_step, step_in_backward

pytestmark = pytest.mark.slow

PACKAGES = ("optim", "offload")
WIDTH, ROWS, SMALL_CHUNK = 160, 32, 32 << 10
EVERY = int(os.environ.get("LOWTIDE_EVERY_LINE", "29"))
"""Of all lines that run in a step, so many are left out between two that are interrupted."""


def build():
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))
    every = list(model.parameters())
    return model, torch.optim.AdamW([{"params": every[:2]}, {"params": every[2:], "lr": 3e-3}], lr=1e-3)


BATCH = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Rows of a weight are then in chunks of their own."""
    monkeypatch.setattr(optimizer_facts, "RESTING_CHUNK_SIZES", (SMALL_CHUNK,))
    for module in (split_check, step_in_backward):
        monkeypatch.setattr(module, "RESTING_CHUNK_BYTES", SMALL_CHUNK)


def step(model, optimizer):
    optimizer.zero_grad()
    model(BATCH).square().mean().backward()
    optimizer.step()


def values(model, optimizer):
    state = [value for own in optimizer.state_dict()["state"].values() for value in own.values()]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *state)]


def is_same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


class Training:
    """A planned model, its checkpoint, and what eager has at the checkpoint and after it."""

    def __init__(self, folder, *, step_in_backward):
        model, optimizer = build()
        self.expected = []
        for _ in range(3):
            step(model, optimizer)
            self.expected.append(values(model, optimizer))
            if len(self.expected) == 1:
                self.checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        self.model, self.optimizer = build()
        self.groups = [list(group["params"]) for group in self.optimizer.param_groups]
        profile = lowtide.profile(
            self.model,
            BATCH,
            optimizer=self.optimizer,
            loss=lambda output: output.square().mean(),
            offload=f"disk:{folder}",
            offload_what="activations,state,parameters",
            step_in_backward=step_in_backward,
        )
        plan = profile.plan(profile.floor_bytes)
        assert sum(name.startswith("parameters:") for name in plan.solution.resting) == 4
        plan.apply(self.model)
        for _ in range(2):  # a first step in backward is a trial
            step(self.model, self.optimizer)
            self.load()

    def load(self):
        model, optimizer = copy.deepcopy(self.checkpoint)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def troubles(self):
        """What is wrong after an interrupt, first without a checkpoint and then with one."""
        found = []
        owned = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if [id(p) for p in owned] != [id(p) for group in self.groups for p in group]:
            found.append("the optimizer has other parameters")
        if not set(map(id, self.optimizer.state)) <= set(map(id, owned)):
            found.append("the optimizer has state of other tensors")
        try:
            step(self.model, self.optimizer)
        except StoreError as error:
            found.append(f"no step without a checkpoint: {error}")
        except Unsupported as error:  # the step in backward is taken, and optimizer.step() was not called
            assert "between backward() and optimizer.step()" in str(error)
        try:
            self.load()
            for expected in self.expected:
                if not is_same(expected, values(self.model, self.optimizer)):
                    found.append("steps after the checkpoint differ from eager's")
                step(self.model, self.optimizer)
            if any(type(parameter) is not nn.Parameter for parameter in self.model.parameters()):
                found.append("a parameter stays guarded")
            weights = [parameter for parameter in self.model.parameters() if parameter.dim() == 2]
            every = [*weights, *(self.optimizer.state[p]["exp_avg"] for p in weights)]
            if any(resting_of(tensor) is None for tensor in every):
                found.append("something does not rest any more")
            self.load()
        except Exception as error:
            found.append(f"no step after a checkpoint: {error!r}")
        return found


def chosen(counts):
    """Lines to interrupt, each in the middle of a step, where some chunks are done: some of all, and those
    that change the groups of the optimizer for a chunk."""
    source, first = inspect.getsourcelines(split_step._only)
    path, last = inspect.getsourcefile(split_step), first + len(source)
    for number, (place, count) in enumerate(sorted(counts.items())):
        if number % EVERY == 0 or (place[0] == path and first <= place[1] < last):
            yield place, (count + 1) // 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("step_in_backward", [False, True])
def test_interrupted_at_any_line_it_goes_on_as_eager(tmp_path, step_in_backward):
    training = Training(tmp_path, step_in_backward=step_in_backward)
    lines = Lines(PACKAGES)
    assert not lines(lambda: step(training.model, training.optimizer))
    training.load()
    interrupted = 0
    for place, number in chosen(lines.counts):
        if Lines(PACKAGES, place, number)(lambda: step(training.model, training.optimizer)):
            interrupted += 1
            assert (place, training.troubles()) == (place, [])
        training.load()
    assert interrupted > 10


@pytest.mark.sample(1)
@pytest.mark.parametrize("step_in_backward", [False, True])
def test_after_a_full_disk_a_checkpoint_or_remove_helps(tmp_path, monkeypatch, caplog, step_in_backward):
    training = Training(tmp_path, step_in_backward=step_in_backward)
    write = os.pwrite

    def fails_after(number):
        left = iter(range(number))

        def full(*args):
            if next(left, None) is None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(*args)

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(StoreError, match="could not write"):
            step(training.model, training.optimizer)
        monkeypatch.setattr(os, "pwrite", write)

    for number in (0, 5, 11):
        fails_after(number)
        with pytest.raises(StoreError, match="was not written whole"):
            step(training.model, training.optimizer)
        training.load()
        for expected in training.expected:
            assert is_same(expected, values(training.model, training.optimizer))
            step(training.model, training.optimizer)
        training.load()
    fails_after(5)
    lowtide.remove(training.model)
    assert "returns to memory as it is" in caplog.text
    every = (
        *training.model.parameters(),
        *(v for s in training.optimizer.state.values() for v in s.values()),
    )
    assert not any(map(resting_of, every))
    training.load()
    step(training.model, training.optimizer)
    assert is_same(training.expected[1], values(training.model, training.optimizer))
