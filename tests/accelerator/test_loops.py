"""Loops around a planned model on the accelerator: a loss that was not given, changing autocast, borders."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from lowtide.torch_compat import dispatch

Loss = Callable[[Tensor], Tensor]
CLASSES = 500


class Classifier(nn.Module):
    """Many classes: the loss takes more than the layers."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1))]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


class Loop:
    """A user's loop: its results and its peak, as the allocator counts it, of every step."""

    def __init__(self, model: nn.Module, *, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model = model
        self.optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.device = next(model.parameters()).device
        self.results: list[Tensor] = []
        self.peaks: list[int] = []

    def step(
        self, x: Tensor, loss: Loss, within: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        torch.manual_seed(len(self.peaks))
        torch.accelerator.reset_peak_memory_stats(self.device)
        with within():
            value = loss(self.model(x))
        value.backward()
        self.optimizer.step()
        gradients = [p.grad.cpu() for p in self.model.parameters() if p.grad is not None]
        self.optimizer.zero_grad()
        self.peaks.append(torch.accelerator.max_memory_allocated(self.device))
        after = [tensor.detach().cpu() for tensor in (*self.model.parameters(), *self.model.buffers())]
        random = torch.get_device_module(self.device).get_rng_state(self.device)
        self.results += [value.detach().cpu(), *gradients, *after, random]

    def equals(self, other: "Loop") -> bool:
        assert len(self.results) == len(other.results)
        return all(map(torch.equal, self.results, other.results))


def planned_and_eager(model: nn.Module) -> tuple[nn.Module, Loop]:
    other = type(model)().to(next(model.parameters()).device)
    other.load_state_dict(model.state_dict())
    return model, Loop(other)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """All warnings of lowtide so far."""

    def warnings() -> list[str]:
        found = [record for record in caplog.records if record.name.startswith("lowtide")]
        return [
            r.getMessage() for r in found if r.levelno >= logging.WARNING and "too busy" not in r.getMessage()
        ]

    with caplog.at_level(logging.WARNING, logger="lowtide"):
        yield warnings


@pytest.mark.parametrize("times", [1, 3])
def test_a_loss_that_was_not_given_is_planned_for(
    times: int, device: torch.device, told: Callable[[], list[str]]
) -> None:
    x, targets = torch.randn(2048, 128, device=device), torch.randint(CLASSES, (2048,), device=device)

    def loss(output: Tensor) -> Tensor:
        return functional.cross_entropy(output.repeat(times, 1), targets.repeat(times))

    model, eager = planned_and_eager(Classifier().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    eager.optimizer = torch.optim.SGD(eager.model.parameters(), lr=1e-2)
    whole = lowtide.profile(model, x, optimizer=optimizer, loss=loss)
    budget = (whole.floor_bytes + whole.peak_bytes) // 2
    lowtide.checkpoint(model, x, budget=budget, optimizer=optimizer)
    for _ in range(4):
        eager.step(x, loss)
    others = torch.accelerator.memory_allocated(device)
    del whole
    loop = Loop(model, optimizer=optimizer)
    own = sum(-(-p.nbytes // 512) * 512 for p in (*model.parameters(), x))
    for _ in range(4):
        loop.step(x, loss)
    assert loop.equals(eager)
    assert not dispatch.active_modes()
    over = [peak - (others - own) - budget for peak in loop.peaks]
    if times == 1:
        assert max(over) <= 0, over
        assert told() == []
    else:
        assert max(over[1:]) <= 0, over
        (words,) = told()
        assert "the loop made" in words and "Pass `loss=`" in words
