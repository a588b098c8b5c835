"""Python's random numbers in forward: results and states as in eager, and a capture moves no state."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide

WIDTH, STEPS = 8, 6
GLOBAL = random.Random(5)


class Draws(nn.Module):
    """Calls `draw` between its layers."""

    def __init__(self, draw: "Draw") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.own, self.numbers = random.Random(0), np.random.default_rng(0)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.draw(self, x).square().mean()


Draw = Callable[[Draws, torch.Tensor], torch.Tensor]


def random_length(model: Draws, x: torch.Tensor) -> torch.Tensor:
    rows = random.randint(1, 4)
    return model.layers[0](x)[:rows]


def layers_by_chance(model: Draws, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x).relu() if model.own.random() < 0.5 else layer(x) * model.own.uniform(0.5, 1.5)
    return x


def order_of_layers(model: Draws, x: torch.Tensor) -> torch.Tensor:
    order = random.sample(range(3), 2)
    random.shuffle(order)
    for number in order:
        x = model.layers[number](x).relu()
    return x


def a_generator_of_its_own(model: Draws, x: torch.Tensor) -> torch.Tensor:
    generator = random.Random(random.randrange(1000))
    for layer in model.layers:
        x = layer(x) * generator.random()
    return x * GLOBAL.random()


def a_number_that_is_added_to_integers(model: Draws, x: torch.Tensor) -> torch.Tensor:
    offset = (torch.arange(WIDTH) + random.uniform(0, 1)) ** random.uniform(1, 2)
    assert offset.dtype is torch.float32
    return model.layers[0](x) * offset


def numbers_of_numpy(model: Draws, x: torch.Tensor) -> torch.Tensor:
    return model.layers[int(model.numbers.integers(3))](x) * model.numbers.uniform()


CASES = [
    random_length,
    layers_by_chance,
    order_of_layers,
    a_generator_of_its_own,
    a_number_that_is_added_to_integers,
    numbers_of_numpy,
]


def states(model: Draws) -> list[Any]:
    own = [random.getstate(), GLOBAL.getstate(), model.own.getstate(), str(model.numbers.bit_generator.state)]
    return [*own, str(np.random.get_state())]


def trained(draw: Draw, *, planned: bool) -> list[list[Any]]:
    """Loss, gradients and random states after each step."""
    for generator in (random, GLOBAL):
        generator.seed(3)
    torch.manual_seed(0)
    model, x = Draws(draw), torch.randn(4, WIDTH)
    if planned:
        before = states(model)
        lowtide.checkpoint(model, x, budget="100%")
        assert states(model) == before
    found: list[list[Any]] = []
    for _ in range(STEPS):
        model.zero_grad()
        loss = model(x)
        loss.backward()
        gradients = [None if weight.grad is None else weight.grad.tolist() for weight in model.parameters()]
        found.append([loss.item(), gradients, states(model)])
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("draw", CASES)
def test_a_model_that_draws_numbers_trains_as_in_eager(draw: Draw) -> None:
    assert trained(draw, planned=True) == trained(draw, planned=False)
