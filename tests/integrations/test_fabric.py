"""Lightning Fabric: its wrapper hands attributes on to the module inside."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lowtide

BATCH = torch.linspace(-1, 1, 8 * 16).reshape(8, 16)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    return model, torch.optim.Adam(model.parameters())


def results(fabric: Any, model: Any, optimizer: Any) -> Iterator[torch.Tensor]:
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(BATCH).square().mean()
        fabric.backward(loss)
        optimizer.step()
        yield loss.detach()
    yield from (parameter.detach().clone() for parameter in model.parameters())


@pytest.mark.sample(2)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("plans_first", [True, False])
def test_a_model_of_fabric_trains_by_its_plan(precision: Any, plans_first: bool) -> None:
    """The plan's route was copied to the module inside, which called the wrapper without end."""
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", precision=precision)
    expected = list(results(fabric, *fabric.setup(*made())))
    model, optimizer = made()
    planned: Any = model
    if plans_first:
        lowtide.checkpoint(model, BATCH, budget="1GB")
        wrapped, optimizer = fabric.setup(model, optimizer)
    else:
        planned = wrapped = fabric.setup(model, optimizer)[0]
        optimizer = fabric.setup_optimizers(torch.optim.Adam(wrapped.parameters()))
        lowtide.checkpoint(wrapped, BATCH, budget="1GB")
    assert all(map(torch.equal, results(fabric, wrapped, optimizer), expected))
    assert list(wrapped.state_dict()) == list(made()[0].state_dict())
    lowtide.remove(planned)
    assert not any("_compiled_call_impl" in vars(module) for module in wrapped.modules())
    wrapped(BATCH)


class HandsOn(nn.Module):
    """A wrapper that sets attributes on the module inside as well."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if "inside" in vars(self).get("_modules", {}) and name != "inside":
            setattr(self.inside, name, value)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inside(x)


def test_nothing_is_set_on_the_module_inside_of_a_wrapper() -> None:
    model, _ = made()
    before = dict(vars(model))
    planned = HandsOn(model)
    lowtide.checkpoint(planned, BATCH, budget="1GB")
    planned(BATCH).sum().backward()
    assert vars(model).keys() == before.keys()
    lowtide.remove(planned)
