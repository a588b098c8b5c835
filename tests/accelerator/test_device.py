"""The step's device: from its tensors, with its index; its own memory alone counts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerator_cases import CASES, check, different, mlp, on, trained
from torch import Tensor, nn
from torch.nn import functional
from training import twin

import lowtide
from lowtide.analyze.captured_step import SCALARS_BYTES
from lowtide.zoo.targets import Target

ALL = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
several = pytest.mark.skipif(ALL < 2, reason="needs two devices")


@pytest.fixture
def second(device: torch.device) -> torch.device:
    """A device that is not the current one."""
    return torch.device(device.type, 1 - device.index)


class Repeated(nn.Module):
    """Activations of 256 bytes, whose blocks are twice as large."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(40):
            x = functional.gelu(self.layer(x))
        return x


def test_a_compiler_backend_counts_the_allocators_blocks(device: torch.device) -> None:
    eager = on(replace(mlp(), model=Repeated(), batch=(torch.randn(8, 8),)), device)
    eager = replace(eager, optimizer=torch.optim.SGD(eager.model.parameters()))
    planned = twin(eager)
    expected = trained(eager)
    budget = expected.peak_bytes * 8 // 10
    compiled = torch.compile(planned.model, backend="lowtide", dynamic=False, options={"budget": budget})
    compiled(*planned.batch)  # measures ops
    seen = trained(replace(planned, model=compiled))
    assert different(expected, replace(seen, results=unwrapped(seen.results))) == []
    assert seen.peak_bytes <= budget


def unwrapped(results: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return [(name.replace("_orig_mod.", ""), value) for name, value in results]


@pytest.mark.sample(1)
@several
@pytest.mark.parametrize(
    ("name", "options"), [("encoder", {}), ("mlp", {"offload": "host"})], ids=["recompute", "offload"]
)
def test_on_a_device_that_is_not_the_current_one(
    second: torch.device, name: str, options: dict[str, Any]
) -> None:
    plan = check(CASES[name](), second, share=0.6, **options)
    assert plan.solution.device == str(second)


@several
def test_a_plan_is_for_all_devices_of_its_kind(device: torch.device, second: torch.device) -> None:
    target = on(CASES["mlp"](), device)
    plan = lowtide.profile(target.model, target.batch, optimizer=target.optimizer, loss=target.loss).plan(
        "60%"
    )
    other = on(target, second)
    eager = twin(other)
    plan.apply(other.model)
    seen = trained(other)
    assert different(trained(eager), seen) == []
    assert seen.peak_bytes <= plan.budget_bytes
    assert lowtide.runtime.runner.runner_of(other.model).schedules.later == {}


class TwoDevices(nn.Module):
    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16, device=first), nn.Linear(16, 16, device=second)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).to(self.second.weight.device)).sum()


@several
def test_two_devices_are_refused(device: torch.device, second: torch.device) -> None:
    model, x = TwoDevices(device, second), torch.randn(4, 16, device=device)
    with pytest.raises(lowtide.LowtideError, match=f"tensors on {device} and {second}.*model.to"):
        lowtide.profile(model, x)
    inside = nn.Linear(16, 16, device=device)
    inside.forward = lambda x: (x.to(second) * 2).sum()  # no tensor of the model or batch is there
    with pytest.raises(lowtide.LowtideError, match=f"tensors on {device} and {second}.*model.to"):
        lowtide.profile(inside, x.requires_grad_())


class MovesItsInputs(nn.Module):
    """Reads a batch, a mask and a buffer of the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))
        self.table: Tensor
        self.register_buffer("table", torch.randn(5000, 64))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        table = self.table
        super()._apply(fn, recurse)
        self.table = table
        return self

    def forward(self, places: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
        device = self.layers[0].weight.device
        x = self.table[places].to(device)
        x = self.layers(x) * scale
        return x * mask.to(device)[:, None]


def on_host() -> Target:
    batch = (torch.randint(5000, (4096,)), torch.randn(4096), torch.tensor(0.5))
    return replace(mlp(), model=MovesItsInputs(), batch=batch)


def measured_as_predicted(target: Target, device: torch.device) -> None:
    """Eager's peak is the predicted one, to the byte, and a plan for 60% stays within its own."""
    eager = replace(target, model=target.model.to(device))
    eager = replace(eager, optimizer=torch.optim.AdamW(eager.model.parameters()))
    planned = twin(eager)
    plan = lowtide.profile(planned.model, planned.batch, optimizer=planned.optimizer, loss=planned.loss).plan(
        "60%"
    )
    expected = trained(eager)
    del eager
    assert plan.baseline_peak_bytes - SCALARS_BYTES == expected.peak_bytes
    plan.apply(planned.model)
    seen = trained(planned)
    assert different(expected, seen) == []
    assert seen.peak_bytes <= plan.peak_bytes


def test_tensors_of_the_host_take_nothing_of_the_device(device: torch.device) -> None:
    measured_as_predicted(on_host(), device)
