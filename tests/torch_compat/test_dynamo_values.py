"""Python code reads values that follow from the batch alone, without a break in the graph."""

from collections.abc import Callable

import pytest
import torch
from budgets import between
from torch import nn
from training import differences, train, twin

import lowtide
from lowtide.runtime.runner import runner_of
from lowtide.torch_compat import dynamo_values
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow

WIDTH = 16
Read = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _branches(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.tanh() if mask.all() else x * mask


def _branches_on_one_of_two(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    everything = mask is None or mask.all()
    return x.tanh() if everything else x * mask


def _negated(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x * mask if not mask.all() else x.tanh()


def _item(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x * mask.sum(dim=1).max().item()


def _int(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x[:, : int(mask.sum(dim=1).max())].sin()


def _index(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x[:, : mask.sum(dim=1).max()].sin()


def _list(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.cat([row[:length].cos() for row, length in zip(x, mask.sum(dim=1).tolist(), strict=True)])


def _bool(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.tanh() if bool((mask > 0).all()) else x * mask


READS: dict[str, Read] = {
    read.__name__.removeprefix("_"): read
    for read in (_branches, _branches_on_one_of_two, _negated, _item, _int, _index, _list, _bool)
}


class Reads(nn.Module):
    def __init__(self, read: Read) -> None:
        super().__init__()
        self.read = read
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.read(self.first(x).exp(), mask).mean() + self.last(x).square().mean()


def _mask(*lengths: int) -> torch.Tensor:
    return (torch.arange(WIDTH) < torch.tensor(lengths)[:, None]).long()


def _target(read: Read, mask: torch.Tensor) -> Target:
    torch.manual_seed(0)
    model = Reads(read)
    batch = (torch.randn(len(mask), WIDTH), mask)
    return Target("reads", model, batch, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", READS)
def test_one_graph_for_each_value(name: str) -> None:
    target = _target(READS[name], _mask(WIDTH, WIDTH))
    other = _mask(3, 5)
    expected = train(twin(target))
    found = lowtide.profile(target.model, target.batch, optimizer=target.optimizer)
    assert len([graph for graph in found.step.graphs if graph.in_model]) == 1
    planned = twin(target)
    found.plan(between(found, 1)).apply(planned.model)
    assert differences(expected, train(planned)) == []
    runner = runner_of(planned.model)
    assert runner is not None and len(runner.backend.graphs) == 1
    x, _ = target.batch
    plain = twin(Target("plain", lowtide.remove(twin(planned).model), (x, other), None))
    assert torch.equal(planned.model(x, other), plain.model(x, other))
    assert len(runner.backend.graphs) == 2, "the guard saw the other value"
    assert torch.equal(planned.model(*target.batch), plain.model(*target.batch))
    assert len(runner.backend.graphs) == 2


def _after_a_change(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mask[0, 0] = 0
    return x.tanh() if mask.all() else x * mask


def _after_a_change_of_a_view(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mask[0].zero_()
    return x.tanh() if mask.all() else x * mask


def _of_weights(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.tanh() if x.sum() > 0 else x * mask


def _random(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.tanh() if (torch.rand(4) * mask.sum() > -1).all() else x * mask


DECIDED_BY_MORE = (_after_a_change, _after_a_change_of_a_view, _of_weights, _random)


@pytest.mark.sample(2)
@pytest.mark.parametrize("read", DECIDED_BY_MORE, ids=lambda read: read.__name__)
def test_what_more_than_the_batch_decides_ends_the_graph(read: Read) -> None:
    target = _target(read, _mask(WIDTH, WIDTH))
    expected = train(twin(target))
    found = lowtide.profile(target.model, twin(target).batch, optimizer=target.optimizer)
    assert len([graph for graph in found.step.graphs if graph.in_model]) > 1
    planned = twin(target)
    found.plan(between(found, 1)).apply(planned.model)
    assert differences(expected, train(planned)) == []


def _in_a_loop_with_breaks(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    for row in mask.sum(dim=1).nonzero():
        x = x.sin() * (1 + int(row))
        torch._dynamo.graph_break()
    return x


def test_a_value_in_a_loop_with_graph_breaks() -> None:
    target = _target(_in_a_loop_with_breaks, _mask(3, 5, 7))
    expected = train(twin(target))
    found = lowtide.profile(target.model, twin(target).batch, optimizer=target.optimizer)
    planned = twin(target)
    found.plan(between(found, 1)).apply(planned.model)
    assert differences(expected, train(planned)) == []


class DropsLayers(nn.Module):
    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand([]) < self.probability:
                continue
            x = layer(x).tanh()
        return x.square().mean()


def test_layers_that_are_never_dropped_are_one_graph() -> None:
    torch.manual_seed(0)
    model = DropsLayers(0.0)
    target = Target("drops", model, torch.randn(4, WIDTH), torch.optim.SGD(model.parameters(), lr=0.1))
    expected = train(twin(target))
    found = lowtide.profile(target.model, target.batch, optimizer=target.optimizer)
    planned = twin(target)
    found.plan(between(found, 0.5)).apply(planned.model)
    assert differences(expected, train(planned)) == []


def test_layers_that_may_be_dropped_are_not_taken_for_certain() -> None:
    torch.manual_seed(0)
    model = DropsLayers(0.2)
    target = Target("drops", model, torch.randn(4, WIDTH), torch.optim.SGD(model.parameters(), lr=0.1))
    expected = train(twin(target), steps=4)
    planned = twin(target)
    found = lowtide.profile(planned.model, planned.batch, optimizer=planned.optimizer)
    assert sum(graph.in_model for graph in found.step.graphs) != 1
    found.plan(found.peak_bytes).apply(planned.model)
    assert differences(expected, train(planned, steps=4)) == []


def test_a_value_that_changes_with_every_batch_ends_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo_values, "MAX_VALUES", 2)

    def read(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x * float(mask.sum().item())

    def num_graphs(length: int) -> int:
        target = _target(read, _mask(length))
        step = lowtide.profile(target.model, target.batch).step
        return len([graph for graph in step.graphs if graph.in_model])

    assert [num_graphs(1), num_graphs(2)] == [1, 1]
    assert num_graphs(3) > 1
    assert num_graphs(2) == 1, "a value that was planned for stays known"
