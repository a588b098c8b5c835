"""Tensors are told apart by which they are, never by what they are called."""

import pytest
import torch
from torch import nn
from training import measured_peak

import lowtide
from lowtide.zoo.targets import Target

ROWS, WIDTH = 512, 64

pytestmark = pytest.mark.slow


class Namesake(nn.Module):
    """Takes keywords with the names of its parameter and of its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return torch.tanh(batch["weight"] @ self.weight * self.scale * batch["scale"]).sum()


class Nested(nn.Module):
    """Reads `a.b` and `a` -> `b`, which have one path in words."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, batch: dict) -> torch.Tensor:
        return torch.tanh(batch["a.b"] @ self.weight * batch["a"]["b"]).sum()


def data() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH)


def assert_predicted(model: nn.Module, batch: object) -> None:
    target = Target("model", model, batch, torch.optim.SGD(model.parameters(), lr=0.1))
    found = lowtide.profile(model, batch, optimizer=target.optimizer)
    measured = measured_peak(target)
    assert 0 <= found.peak_bytes - measured <= 2048
    plan = found.plan(found.floor_bytes)
    plan.apply(model)
    assert measured_peak(target) <= plan.budget_bytes


def test_a_keyword_with_the_name_of_a_parameter_is_another_tensor() -> None:
    assert_predicted(Namesake(), {"weight": data(), "scale": data()})


def test_two_inputs_with_one_path_in_words_are_two_tensors() -> None:
    assert_predicted(Nested(), ({"a.b": data(), "a": {"b": data()}},))


def test_one_tensor_given_twice_counts_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ self.weight * y).sum()

    same = data()
    assert_predicted(Twice(), (same, same))
