"""numpy in forward runs as eager runs it, as does what fails, and a capture moves no random state."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import lowtide

WIDTH = 16

pytestmark = pytest.mark.slow


class Draws(nn.Module):
    """Draws from numpy's and torch's generators."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        factor = torch.from_numpy(np.random.rand(WIDTH).astype(np.float32))
        return self.last(hidden * factor + torch.rand_like(hidden)).sum()


class Computes(nn.Module):
    """Lets numpy compute a constant of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.from_numpy(np.tanh(x.numpy()))
        return self.last(torch.tanh(self.first(x)) * scale).square().sum()


class Scales(nn.Module):
    """Gives torch a number that numpy has made: the same each time, or another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = np.log(3.0)
        noise = torch.empty(WIDTH).uniform_(-high, high)
        return (self.last(torch.tanh(self.first(x)) * np.random.uniform()) * noise).sum()


class Catches(nn.Module):
    """Tries what fails."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self._rows_of_seven(torch.tanh(self.first(x)))).square().sum()

    def _rows_of_seven(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return x.view(7, -1)
        except RuntimeError:
            return x.sin()


def seed() -> None:
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [Draws, Computes, Scales, Catches])
def test_code_that_torch_cannot_follow_runs_as_in_eager(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    plain, batch = kind(), torch.randn(8, WIDTH)
    planned = lowtide.checkpoint(copy.deepcopy(plain), batch, budget="1GB")
    for model in (plain, planned):
        seed()
        for _ in range(2):
            model(batch).backward()
    pairs = zip(plain.parameters(), planned.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


def test_a_capture_leaves_all_random_states_as_they_were() -> None:
    seed()
    model, batch = Draws(), torch.randn(8, WIDTH)
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    lowtide.profile(model, batch)
    after = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    assert before[:2] == after[:2] and torch.equal(before[2], after[2])
