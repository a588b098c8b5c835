"""Hooks of parameters that the loss does not reach: called as often as in eager, and never with None."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import lowtide

pytestmark = pytest.mark.slow

ROWS, WIDTH = 256, 16


class TwoHeads(nn.Module):
    """Returns two values; `only_read` takes part in the forward pass and never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.only_read = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.body(x) * self.only_read.detach())
        return self.first(x), self.second(x)


def first(outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return outputs[0].square().mean()


def both(outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return first(outputs) + outputs[1].square().mean()


def called(model: nn.Module, x: torch.Tensor, losses: list[Any]) -> list[set[tuple[str, str]]]:
    """Which hooks each step calls."""
    seen: set[tuple[str, str]] = set()

    def note(when: str, name: str, value: Any) -> None:
        assert (value.grad if when == "after" else value) is not None
        seen.add((when, name))

    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: note("before", name, gradient))
        parameter.register_post_accumulate_grad_hook(lambda owner, name=name: note("after", name, owner))
    found = []
    for loss in losses:
        seen.clear()
        loss(model(x)).backward()
        found.append(set(seen))
        model.zero_grad()
    return found


@pytest.mark.parametrize(("loss", "losses"), [(first, [first, first]), (both, [first, both, first])])
def test_hooks_are_called_as_in_eager(loss: Any, losses: list[Any]) -> None:
    torch.manual_seed(0)
    model, x = TwoHeads(), torch.randn(ROWS, WIDTH)
    planned = lowtide.checkpoint(copy.deepcopy(model), x, budget="100%", loss=loss)
    expected = called(model, x, losses)
    assert ("after", "first.weight") in expected[0] and ("after", "second.weight") not in expected[0]
    assert called(planned, x, losses) == expected


def test_hooks_are_the_users_own_again_without_the_plan() -> None:
    torch.manual_seed(0)
    model, x = TwoHeads(), torch.randn(ROWS, WIDTH)
    weight, after = model.second.weight, print
    weight.register_hook(torch.zeros_like)
    weight.register_post_accumulate_grad_hook(after)
    lowtide.checkpoint(model, x, budget="100%", loss=first)
    first(model(x)).backward()
    assert list(weight._backward_hooks.values()) != [torch.zeros_like]
    lowtide.remove(model)
    assert list(weight._backward_hooks.values()) == [torch.zeros_like]
    assert list(weight._post_accumulate_grad_hooks.values()) == [after]


def test_a_hook_can_still_be_removed_and_changes_a_gradient() -> None:
    torch.manual_seed(0)
    model, x = TwoHeads(), torch.randn(ROWS, WIDTH)
    handle = model.first.weight.register_hook(torch.zeros_like)
    lowtide.checkpoint(model, x, budget="100%", loss=first)
    first(model(x)).backward()
    assert not model.first.weight.grad.any()
    handle.remove()
    model.zero_grad()
    first(model(x)).backward()
    assert model.first.weight.grad.any()
