"""Random generators: what lowtide runs besides the user's loop moves none of them, on no device."""

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerator_cases import as_target, on
from torch import nn

import lowtide
from lowtide.generators import generators_kept, random_state
from lowtide.verification.measure_step import measure_here
from lowtide.zoo.targets import Target


def states(device: torch.device) -> dict[str, list[int]]:
    """The states of all generators of torch."""
    names = ["cpu", *(f"{device.type}:{index}" for index in range(torch.accelerator.device_count()))]
    return {name: random_state(name).tolist() for name in names}


class Unpicklable(nn.Module):
    """Draws on its device between two graphs, and cannot be sent to another process."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.own = model, lambda x: x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.own(self.model(x))
        torch._dynamo.graph_break()
        return x * torch.rand_like(x)


class Pure(nn.Module):
    """Has no tensor: its batch alone says where it draws."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = float(torch.rand(1, device=x.device)) + torch.nn.functional.dropout(x)
        return scale * x


def small(device: torch.device) -> Target:
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Dropout(0.2), nn.GELU())]
    return on(as_target(nn.Sequential(*layers), torch.randn(512, 64)), device)


def settings(target: Target) -> dict[str, Any]:
    return {"optimizer": target.optimizer, "loss": target.loss}


def profile(target: Target) -> lowtide.Profile:
    return lowtide.profile(target.model, target.batch, **settings(target))


def profile_by_a_run(target: Target) -> None:
    lowtide.profile(target.model, target.batch, mode="run", **settings(target))


def checkpoint(target: Target) -> None:
    lowtide.checkpoint(target.model, target.batch, budget="80%", **settings(target))


def offload(target: Target) -> None:
    lowtide.checkpoint(target.model, target.batch, budget="80%", offload="host", **settings(target))


def verify_here(target: Target) -> None:
    target = replace(target, model=Unpicklable(target.model))
    found = lowtide.verify(target.model, target.batch, profile(target).plan("80%"), **settings(target))
    assert found.exact and not found.fresh_process


def measure_in_this_process(target: Target) -> None:
    measure_here(target)


def without_parameters(target: Target) -> None:
    lowtide.profile(Pure(), target.batch[0].clone().requires_grad_())


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "run",
    [
        profile,
        profile_by_a_run,
        checkpoint,
        offload,
        verify_here,
        measure_in_this_process,
        without_parameters,
    ],
)
def test_every_generator_is_as_before(run: Callable[[Target], object], device: torch.device) -> None:
    target = small(device)
    torch.manual_seed(5)
    for index in range(torch.accelerator.device_count()):
        torch.rand(3 + index, device=f"{device.type}:{index}")
    before = states(device)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*fork_rng.*")
        run(target)
    assert states(device) == before


def test_generators_of_other_devices_are_not_touched(device: torch.device) -> None:
    before = states(device)
    with contextlib.suppress(KeyError), generators_kept([torch.device(device.type)]):
        torch.rand(4)
        torch.rand(4, device=device)
        raise KeyError
    assert states(device) == before
