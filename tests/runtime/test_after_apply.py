"""What users do with a planned model later on: it is followed, told, or refused, and never ignored."""

import copy
import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trouble import BATCH, WIDTH

import lowtide
from lowtide.plans import Plan
from lowtide.runtime import backend, observer, runner
from lowtide.torch_compat import dynamo
from lowtide.units import format_size

pytestmark = pytest.mark.slow


class Stack(nn.Module):
    """Four layers; `loud` lets the forward read a value on its way, `steps` is a number that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.loud, self.steps = "", 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:3]:
            x = F.gelu(layer(x))
            if self.loud == "in a loop":
                print(f"{x.mean().item():.1f}")
        if self.loud == "half-way":
            print(f"{x.mean().item():.1f}")
        return self.layers[3](x) * (1 + self.steps)


def rows() -> torch.Tensor:
    return torch.randn(BATCH, WIDTH)


def planned(model: nn.Module, **options: Any) -> Plan:
    found = lowtide.profile(model, rows(), **options)
    plan = found.plan(found.floor_bytes)
    plan.apply(model)
    return plan


def test_hooks_that_come_later_are_called() -> None:
    model = Stack()
    planned(model)
    model(rows()).sum().backward()
    seen = []
    handle = model.layers[1].register_forward_hook(lambda *_: seen.append("forward"))
    model.layers[0].register_forward_pre_hook(lambda *_: seen.append("before"))
    model(rows()).sum().backward()
    assert seen == ["before", "forward"]
    handle.remove()
    model(rows()).sum().backward()
    assert seen == ["before", "forward", "before"]


def test_parameters_that_cannot_be_trained_within_the_budget_are_refused() -> None:
    model = Stack()
    model.layers[:3].requires_grad_(False)
    planned(model, optimizer=torch.optim.Adam(model.parameters()))
    model(rows()).sum().backward()
    model.requires_grad_(True)
    with pytest.raises(lowtide.BudgetTooSmall, match="the lowest reachable peak"):
        model(rows())


def test_inputs_with_a_gradient_of_their_own_are_no_graph_break() -> None:
    model, before = Stack(), nn.Linear(WIDTH, WIDTH)
    plain = copy.deepcopy(model)
    planned(model)
    for count in (BATCH, BATCH - 1):
        batch, found = rows()[:count], []
        for follows in (plain, model):
            before.zero_grad()
            follows(before(batch)).sum().backward()
            found.append(before.weight.grad)
        assert torch.equal(*found)


class Cut(Stack):
    """Gives as many columns less as there were steps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, self.steps :]


def test_numbers_of_shapes_that_change_all_the_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dynamo, "GRAPHS_PER_FUNCTION", 2)
    monkeypatch.setattr(backend, "REMEMBERED_GRAPHS", 2)
    monkeypatch.setattr(observer, "MANY_GRAPHS", 3)
    model = Cut()
    plain = copy.deepcopy(model)
    planned(model)
    batch = rows()
    for number in (0, 1, 2, 3, 3, 0):
        model.steps = plain.steps = number
        model.zero_grad()
        assert torch.equal(model(batch), plain(batch))
    (words,) = warnings_of(caplog)
    assert "3 graphs were planned so far" in words and "pass numbers that change as tensors" in words
    assert runner.runner_of(model).backend.num_graphs == 5, "one that left is compiled again"


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_gradients_that_are_there_already_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Stack()
    planned(model)
    model(rows()).sum().backward()
    assert warnings_of(caplog) == []
    for _ in range(2):
        model(rows()).sum().backward()
    (words,) = warnings_of(caplog)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    assert format_size(nbytes) in words and "accumulate=True" in words


def test_gradients_that_fit_into_the_budget_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    model = Stack()
    lowtide.checkpoint(model, rows(), budget="1GiB")
    for _ in range(2):
        model(rows()).sum().backward()
    assert warnings_of(caplog) == []


# the backend


def images() -> torch.Tensor:
    return torch.randn(4, 3, 16, 16)


def costs_in(folder: Path) -> dict[str, tuple[int, bool]]:
    """By call: bytes of workspace, and whether they are estimated."""
    (path,) = folder.glob("costs-*.sqlite")
    with closing(sqlite3.connect(path)) as database:
        rows = database.execute("select signature, workspace_bytes, estimated from costs")
        return {name: (workspace_bytes, bool(estimated)) for name, workspace_bytes, estimated in rows}


def test_ops_are_measured_on_real_tensors_while_torch_compiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 8, 3))
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "profiled"))
    lowtide.profile(model, images())
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "compiled"))
    compiled = torch.compile(model, backend="lowtide", dynamic=False, options={"budget": "1GiB"})
    compiled(images()).sum().backward()
    profiled, while_compiling = costs_in(tmp_path / "profiled"), costs_in(tmp_path / "compiled")
    both = [name for name in while_compiling if name in profiled and "convolution" in name]
    assert both
    for name in both:
        workspace_bytes, estimated = while_compiling[name]
        assert not estimated and workspace_bytes == profiled[name][0] > 0


def test_the_backend_needs_fixed_shapes() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    compiled = torch.compile(model, backend="lowtide", dynamic=True, options={"budget": "1GiB"})
    with pytest.raises(Exception, match="dynamic=False"):
        compiled(rows())
