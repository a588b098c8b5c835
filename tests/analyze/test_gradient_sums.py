"""Gradients are summed in eager's order; where they are not, the user is told before training."""

import copy
import logging

import pytest
import torch
from torch import nn

import lowtide

pytestmark = pytest.mark.slow

WIDTH = 32
WORDS = "several views of one value that it also uses itself"


class ReturnsViews(nn.Module):
    def __init__(self, *, copies: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.copies = copies

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.first(x).tanh()
        views = h[:16], h.t()
        if self.copies:
            views = views[0].clone(), views[1].clone()
        return views[0], self.second(h), self.third(h), views[1]


class Shared(nn.Module):
    """A value or a weight that one graph uses twice, a later one four times more, and the loss once."""

    def __init__(self, *, what: str, outside: bool = False) -> None:
        super().__init__()
        self.what = what
        self.first, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = _not_followed if outside else torch.sin

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.first(x).tanh()
        torch._dynamo.graph_break()
        uses = [self._use(hidden, number).sin() for number in range(2)]
        torch._dynamo.graph_break()
        uses += [self._use(hidden, number).cos() for number in range(4)]
        return self.last(hidden), torch.stack(uses).sum(dim=0)

    def _use(self, hidden: torch.Tensor, number: int) -> torch.Tensor:
        return hidden * (number + 0.3) if self.what == "value" else self.other(hidden.detach() + number)


@torch._dynamo.disable
def _not_followed(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.exp()


class UsesLayerTwice(nn.Module):
    """A layer of cells, whose backward is one op, before and after a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)[0]
        torch._dynamo.graph_break()
        return self.layer(hidden)[0]


def everything(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.stack([output.pow(2).sum() for output in outputs]).sum()


def layers(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return everything(outputs[1:3])


@pytest.mark.parametrize(
    ("copies", "loss", "told"), [(False, everything, True), (True, everything, False), (False, layers, False)]
)
def test_views_of_one_value(caplog: pytest.LogCaptureFixture, copies: bool, loss, told: bool) -> None:
    torch.manual_seed(0)
    planned, batch = ReturnsViews(copies=copies), torch.randn(64, WIDTH)
    plain = copy.deepcopy(planned)
    with caplog.at_level(logging.WARNING, "lowtide"):
        lowtide.checkpoint(planned, batch, budget="100%", loss=loss)
    loss(planned(batch)).backward()
    loss(plain(batch)).backward()
    expected = [parameter.grad for parameter in plain.parameters()]
    found = [parameter.grad for parameter in planned.parameters()]
    planned.zero_grad()
    planned(batch)
    lines = [record.getMessage() for record in caplog.records if record.name == "lowtide"]
    assert [WORDS in line for line in lines if "too busy" not in line] == [True] * told
    assert told or all(map(torch.equal, found, expected))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("what", "outside"),
    [
        ("value", False),
        ("weight", True),
        pytest.param("value", True, marks=pytest.mark.long),
        pytest.param("weight", False, marks=pytest.mark.long),
    ],
)
def test_what_several_graphs_use_several_times(what: str, outside: bool) -> None:
    torch.manual_seed(0)
    planned, batch = Shared(what=what, outside=outside), torch.randn(64, WIDTH)
    plain = copy.deepcopy(planned)
    found = lowtide.profile(planned, batch, loss=everything)
    assert any(graph.apart for graph in found.step.graphs)
    found.plan(found.floor_bytes).apply(planned)
    for rows in (64, 64, 48):
        everything(planned(batch[:rows])).backward()
        everything(plain(batch[:rows])).backward()
        pairs = zip(planned.parameters(), plain.parameters(), strict=True)
        assert all(eager.grad is None or torch.equal(ours.grad, eager.grad) for ours, eager in pairs)


def test_a_graph_alone_adds_up_its_own() -> None:
    found = lowtide.profile(ReturnsViews(copies=True), torch.randn(64, WIDTH), loss=everything)
    assert not any(graph.apart for graph in found.step.graphs)


def test_a_sum_inside_of_an_op_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lowtide"):
        lowtide.profile(UsesLayerTwice(), torch.randn(4, 3, WIDTH), loss=torch.sum)
    assert any("uses 'layer." in record.getMessage() for record in caplog.records)
