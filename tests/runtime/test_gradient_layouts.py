"""Gradients that come in another order in memory than the output they belong to."""

import copy
import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide.torch_compat.aot_autograd import in_another_order

pytestmark = pytest.mark.slow

SIZE = 15
LABELS = torch.zeros(5, SIZE, SIZE, dtype=torch.long)


class Dense(nn.Module):
    """Returns an image, in the order that its convolutions give."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 7, 3), nn.BatchNorm2d(7)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Transposed(nn.Module):
    """Returns a transposed image behind an op that keeps its order."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.conv = nn.Linear(3, 7), nn.Conv2d(7, 7, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return torch.tanh(self.conv(x).transpose(2, 3))[..., :SIZE, :SIZE]


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, LABELS)


def loss_of_both(outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return loss_of(outputs[0]) + F.binary_cross_entropy_with_logits(outputs[1], torch.ones_like(outputs[1]))


def batch_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, 3, 19, 19).contiguous(memory_format=torch.channels_last)


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    output = model(x)
    F.cross_entropy(output, LABELS[: len(x)]).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [Dense, Transposed])
def test_a_known_loss_is_exact_from_the_first_step_on(
    kind: type[nn.Module], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    planned, x = kind().to(memory_format=torch.channels_last), batch_of(5)
    eager, again = copy.deepcopy(planned), copy.deepcopy(planned)
    with caplog.at_level(logging.WARNING, "lowtide"):
        found = lowtide.profile(planned, x, loss=loss_of)
        plan = found.plan((found.floor_bytes + found.peak_bytes) // 2)
        plan.apply(planned)
        plan.save(tmp_path / "plan.json")
        lowtide.load_plan(tmp_path / "plan.json").apply(again)
        for _ in range(2):
            expected = step(eager, x)
            assert equal(expected, step(planned, x))
            assert equal(expected, step(again, x))
        other = batch_of(4)
        assert equal(step(eager, other), step(planned, other)), "another shape"
    assert "last bits" not in caplog.text


def test_an_unknown_loss_is_exact_from_the_first_step_on() -> None:
    planned, x = Dense().to(memory_format=torch.channels_last), batch_of(5)
    eager = copy.deepcopy(planned)
    lowtide.profile(planned, x).plan("300%", planner="none").apply(planned)
    for rows in (5, 5, 4):
        x = batch_of(rows)
        assert equal(step(eager, x), step(planned, x))


class TwoImages(nn.Module):
    """Two images of one order, of which one gets its gradient in that order and the other does not."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = Dense()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.dense(x)
        return scores, scores.tanh()


class Affine(nn.Module):
    """The gradient of the bias is a sum over the whole gradient as it is in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 32)), nn.Parameter(torch.randn(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class Slices(nn.Module):
    """Rows go from graph to graph: their gradient is a part of a larger one, with gaps between batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Affine(), nn.Linear(32, 32)
        self.token = nn.Parameter(torch.randn(1, 1, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1)
        return self.last(x).tanh()


def loss_of_parts(output: torch.Tensor) -> torch.Tensor:
    """The gradient of a real part has every second element of a complex tensor's memory."""
    return torch.complex(output, torch.ones_like(output)).square().abs().sum()


@pytest.mark.sample(4)
@pytest.mark.parametrize("is_told", [True, False], ids=["known loss", "unknown loss"])
@pytest.mark.parametrize("case", ["two orders", "gaps between rows", "gaps between elements"])
def test_gradients_reach_graphs_as_they_are_in_memory(
    case: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = {"two orders": TwoImages, "gaps between rows": Slices}.get(case, Affine)()
    loss = {"two orders": loss_of_both, "gaps between rows": torch.sum}.get(case, loss_of_parts)
    x = batch_of(5) if case == "two orders" else torch.randn(5, 7, 8)
    model.to(memory_format=torch.channels_last) if case == "two orders" else None
    planned = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING, "lowtide"):
        lowtide.checkpoint(planned, x, budget="300%", loss=loss if is_told else None)
        for _ in range(2):
            for one in (model, planned):
                one.zero_grad()
                loss(one(x)).backward()
            pairs = zip(model.parameters(), planned.parameters(), strict=True)
            assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
    assert "last bits" not in caplog.text


def test_orders() -> None:
    assert in_another_order((4, 5), (5, 1), (1, 4))
    assert not in_another_order((4, 5), (5, 1), (0, 0)), "the same number everywhere"
    assert not in_another_order((4, 5), (5, 1), (20, 2)), "a part of something larger"
    assert not in_another_order((1, 5), (5, 1), (1, 1)), "one row has no order"
