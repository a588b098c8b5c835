"""A method that lowtide does not have, added from here: its own class, and one entry of the registry."""

from typing import Any

import pytest
import torch
from plans_by_hand import by_hand
from torch import fx, nn
from training import differences, measured_peak, train, twin

import lowtide
from lowtide import remat
from lowtide.facts import Action
from lowtide.ops.calls import Call
from lowtide.remat.rule import Kept, RematRule
from lowtide.runtime.runner import runner_of
from lowtide.zoo.targets import Target

aten = torch.ops.aten
ROWS, WIDTH = 256, 96

pytestmark = pytest.mark.slow


def half_of(value: torch.Tensor, half: int) -> torch.Tensor:
    return value.reshape(-1).chunk(2)[half].clone()


def joined(first: torch.Tensor, second: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return torch.cat((first, second)).view(shape)


class Halves(RematRule):
    """Keeps the result of a tanh as two halves."""

    name = "halves"
    words = "put together from its two halves"
    action = Action.RETAINED

    def why_not(self, node: fx.Node) -> str | None:
        return "" if node.target is aten.tanh.default else None

    def kept(self, node: fx.Node) -> tuple[Kept, ...]:
        value = node.meta["val"]
        with value.fake_mode:
            half = torch.empty(value.numel() // 2, dtype=value.dtype)
        return tuple(Kept(f"half_{i}", Call(half_of, (node, i)), half) for i in range(2))

    def call(self, node: fx.Node, kept: tuple[Kept, ...]) -> Call:
        return Call(joined, (*kept, list(node.meta["val"].shape)))


def narrowed(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.int16)


def widened(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.int64)


class Narrow(RematRule):
    """Keeps the indices of a sort in a quarter of their bytes; takes the place of lowtide's own."""

    name = "narrow"
    words = "widened from 16 bits"
    action = Action.RETAINED

    def why_not(self, node: fx.Node) -> str | None:
        value = node.meta.get("val")
        is_index = isinstance(value, torch.Tensor) and value.dtype is torch.int64
        return "" if is_index and node.op == "call_function" else None

    def kept(self, node: fx.Node) -> tuple[Kept, ...]:
        with node.meta["val"].fake_mode:
            small = torch.empty(node.meta["val"].shape, dtype=torch.int16)
        return (Kept("narrow", Call(narrowed, (node,)), small),)

    def call(self, node: fx.Node, kept: tuple[Kept, ...]) -> Call:
        return Call(widened, kept)

    def blocks(self, node: fx.Node, *, makes: Any, holds: Any) -> tuple[Any, Any]:
        return holds, holds


class Chain(nn.Module):
    """Tanh after tanh, and a random op, whose values cannot be cut out of the chain for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * torch.rand_like(x)
        return x.square().sum()


class Sorted(nn.Module):
    """Sorts, which is done once, and keeps the indices, which are large."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(x)
            x = hidden.gather(1, hidden.argsort(dim=1, stable=True))
        return x.square().sum()


def pair(model: nn.Module) -> tuple[Target, Target]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain = Target("model", model, torch.randn(ROWS, WIDTH), optimizer)
    return plain, twin(plain)


def test_a_value_is_kept_as_two_halves(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(remat, "REMAT_RULES", (Halves(), *remat.REMAT_RULES))
    plain, planned = pair(Chain())
    found = lowtide.profile(planned.model, planned.batch, optimizer=planned.optimizer)
    tanhs = [node for node in found.nodes if node.op == "aten.tanh.default"]
    assert [[remat.rule for remat in node.remats] for node in tanhs] == [["halves", "again"]] * 5
    plan = by_hand(found, "halves")
    plan.save(tmp_path / "plan.json")
    plan = lowtide.load_plan(tmp_path / "plan.json")
    plan.apply(planned.model)
    assert differences(train(plain), train(planned)) == []
    assert abs(measured_peak(planned) / plan.peak_bytes - 1) < 0.01
    (graphs,) = [graphs for _, _, graphs in runner_of(planned.model).backend.graphs]
    assert [node.target for node in graphs.backward.graph.nodes].count(joined) == 5
    assert [node.target for node in graphs.forward.graph.nodes].count(half_of) == 10


def test_the_planner_takes_a_method_where_it_pays(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    plain, planned = pair(Sorted())
    others = tuple(method for method in remat.REMAT_RULES if method.name != Narrow.name)
    monkeypatch.setattr(remat, "REMAT_RULES", others)
    without = lowtide.profile(planned.model, planned.batch, optimizer=planned.optimizer)
    monkeypatch.setattr(remat, "REMAT_RULES", (*others, Narrow()))
    found = lowtide.profile(planned.model, planned.batch, optimizer=planned.optimizer)
    assert found.peak_bytes == without.peak_bytes
    budget = without.floor_bytes
    plan, before = found.plan(budget), without.plan(budget)
    narrow = [decision for decision in plan.decisions if decision.method == "narrow"]
    assert narrow and all(decision.action is Action.RETAINED for decision in narrow)
    assert all(4 * decision.held_bytes == decision.nbytes for decision in narrow)
    assert all(decision.seconds > 0 for decision in narrow)
    assert "widened from 16 bits" in narrow[0].reason
    assert plan.recompute_seconds < before.recompute_seconds
    plan.apply(planned.model)
    assert differences(train(plain), train(planned)) == []
    assert measured_peak(planned) <= plan.budget_bytes
    assert abs(measured_peak(planned) / plan.peak_bytes - 1) < 0.01
    plan.to_csv(tmp_path)
    assert ",narrow," in (tmp_path / "ac_decisions.csv").read_text()
