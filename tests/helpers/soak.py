"""Long runs of small models: memory growth, and equality with eager."""

import copy
import gc
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from storages import storage_bytes
from torch import nn
from training import differences, train, twin

import lowtide
from lowtide.trace.model_call import call, loss_of
from lowtide.zoo.targets import Target

WIDTH = 16
Results = list[torch.Tensor]


def small_model(seed: int = 0, *, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(seed)
    blocks = [
        nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.1))
        for _ in range(3)
    ]
    return nn.Sequential(*blocks)


def batches(rows: int, seed: int = 0) -> Iterator[torch.Tensor]:
    """New random numbers for every step."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(rows, WIDTH, generator=generator)


class Trainee:
    """One model in its loop. It has its own random numbers."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        self.random = torch.Generator().manual_seed(7).get_state()

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng():
            torch.set_rng_state(self.random)
            loss = self.model(batch).square().mean()
            loss.backward()
            self.random = torch.get_rng_state()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def pair(*, rows: int, seed: int = 0) -> tuple[Trainee, Trainee]:
    """The same model twice: eager, and with a plan near its lowest peak."""
    plain = Trainee(small_model(seed))
    planned = Trainee(copy.deepcopy(plain.model))
    found = lowtide.profile(planned.model, next(batches(rows)), optimizer=planned.optimizer)
    found.plan((3 * found.floor_bytes + found.peak_bytes) // 4).apply(planned.model)
    return plain, planned


def resident_bytes() -> int:
    """What the system counts for this process; 0 where it does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)


def growth_over(steps: int, both: tuple[Trainee, Trainee], *, rows: int) -> tuple[int, int]:
    """Growth of storages and of resident bytes while a planned model trains beside an eager one; their
    losses are compared at every step."""
    plain, planned = both
    source = batches(rows, seed=1)
    for _ in range(10):
        batch = next(source)
        assert torch.equal(plain.step(batch), planned.step(batch))
    del batch
    storages, resident = storage_bytes(), resident_bytes()
    for number in range(steps):
        batch = next(source)
        assert torch.equal(plain.step(batch), planned.step(batch)), number
    del batch
    gc.collect()
    assert_equal(plain.model, planned.model)
    return storage_bytes() - storages, resident_bytes() - resident


def many_shapes(count: int, both: tuple[Trainee, Trainee]) -> int:
    """Train on batches of `count` sizes, twice each; by how much storages grow in the second round."""
    plain, planned = both
    live_bytes = []
    for _ in range(2):
        live_bytes.append(storage_bytes())
        for rows in range(2, count + 2):
            batch = next(batches(rows, seed=rows))
            assert torch.equal(plain.step(batch), planned.step(batch)), rows
        del batch
    assert_equal(plain.model, planned.model)
    return storage_bytes() - live_bytes[-1]


def many_plans(count: int) -> tuple[int, int]:
    """Plan, apply, train and remove again and again; growth of storages and of what torch has cached."""
    plain = Trainee(small_model())
    planned = Trainee(copy.deepcopy(plain.model))
    batch = next(batches(64))
    live_bytes = objects = 0
    for number in range(count):
        found = lowtide.profile(planned.model, batch, optimizer=planned.optimizer)
        share = number / max(1, count - 1)
        found.plan(found.floor_bytes + int(share * (found.peak_bytes - found.floor_bytes))).apply(
            planned.model
        )
        assert torch.equal(plain.step(batch), planned.step(batch)), number
        lowtide.remove(planned.model)
        assert torch.equal(plain.step(batch), planned.step(batch)), number
        assert "forward" not in vars(planned.model)
        del found
        if number == count // 2:
            live_bytes, objects = storage_bytes(), len(gc.get_objects())
    assert_equal(plain.model, planned.model)
    return storage_bytes() - live_bytes, len(gc.get_objects()) - objects


def two_threads(steps: int) -> None:
    """Two models are planned and trained at the same time, each in a thread of its own, and stay apart.

    Without random ops: torch has one generator for all threads. No thread trains before both have compiled,
    also for the loss that the first step shows: during a compilation, torch tells all threads that they are
    being compiled, and eager's own optimizers then round differently.
    """
    together = threading.Barrier(2, timeout=120)
    pairs = [(_twin(seed), _twin(seed)) for seed in (1, 2)]
    failures: list[BaseException] = []

    def work(plain: Target, planned: Target) -> None:
        try:
            found = lowtide.profile(planned.model, planned.batch, optimizer=planned.optimizer)
            found.plan(found.floor_bytes).apply(planned.model)
            for _ in range(3):
                loss_of(call(planned.model, planned.batch), planned.loss).backward()
                planned.model.zero_grad()
            together.wait()
            different = differences(train(plain, steps=steps), train(planned, steps=steps))
            different = [name for name in different if not name.startswith("random state")]
            assert not different, different
        except BaseException as error:
            together.abort()
            failures.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        threads = [threading.Thread(target=work, args=both) for both in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    if failures:
        raise failures[0]


def _twin(seed: int) -> Target:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2 + seed)))
    batch = torch.randn(32 * seed, WIDTH)
    return twin(Target(f"thread {seed}", model, batch, torch.optim.Adam(model.parameters())))


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, mine), theirs in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name
