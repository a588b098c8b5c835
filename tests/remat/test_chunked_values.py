"""Chains of pointwise ops, a slice at a time: forward values come back so, and backward ops run so."""

from collections.abc import Iterator

import pytest
import torch
from plans_by_hand import by_hand
from torch import nn
from training import differences, measured_peak, train, twin

import lowtide
from lowtide.ops.pointwise_chunks import in_chunks
from lowtide.planning.planner import Planner
from lowtide.runtime.runner import runner_of
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        cubic = hidden + 0.044715 * hidden**3
        return x + self.down(0.5 * hidden * (1 + torch.tanh(0.7978845608 * cubic)))


@pytest.mark.parametrize(
    ("dtype", "threads"),
    [
        *((torch.float32, 2), (torch.bfloat16, 1)),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((torch.float32, 1), (torch.bfloat16, 2))),
    ],
    indirect=["threads"],
)
def test_a_chain_comes_back_in_chunks(dtype: torch.dtype, threads: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(513), Block(513)).to(dtype)
    batch = torch.randn(1024 * threads + 3, 16, dtype=dtype)
    plain = Target("model", model, batch, torch.optim.SGD(model.parameters(), lr=0.1))
    planned = twin(plain)
    found = lowtide.profile(planned.model, planned.batch, optimizer=planned.optimizer)
    ends = [node for node in found.nodes if node.remat("slices") is not None]
    # the factor of the gradient is read in backward, the end of the chain by the next layer's weights
    assert {node.op for node in ends} == {"aten.tanh.default", "aten.add.Tensor", "aten.mul.Tensor"}
    plan = by_hand(found, "slices")
    assert plan.peak_bytes < found.peak_bytes
    plan.apply(planned.model)
    assert differences(train(plain), train(planned)) == []
    assert abs(measured_peak(planned) / plan.peak_bytes - 1) < 0.01
    (graphs,) = [graphs for _, _, graphs in runner_of(planned.model).backend.graphs]
    assert in_chunks in [node.target for node in graphs.backward.graph.nodes]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("dtype", "threads"), [(torch.float32, 1), (torch.bfloat16, 2)], indirect=["threads"]
)
def test_a_backward_chain_lowers_the_floor(dtype: torch.dtype, threads: int) -> None:
    """Where the gradient of a formula written by hand sets the peak."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(513), Block(513)).to(dtype)
    batch = torch.randn(1024 * threads + 3, 16, dtype=dtype)
    plain = Target("model", model, batch, torch.optim.SGD(model.parameters(), lr=0.1))
    planned = twin(plain)
    found = lowtide.profile(planned.model, planned.batch, optimizer=planned.optimizer)
    without = Planner(found.step)
    assert found.floor_bytes < 0.9 * without.floor_bytes
    plan = found.plan(found.floor_bytes)
    assert any("inside of" in row.reason and row.method == "slices" for row in plan.decisions)
    assert plan.solution.lower_bound_seconds is not None
    for budget_bytes in (found.floor_bytes, without.floor_bytes, found.peak_bytes):
        one_by_one = without.best(budget_bytes)
        assert one_by_one is None or found.plan(budget_bytes).recompute_seconds <= one_by_one.added_seconds
    plan.apply(planned.model)
    assert differences(train(plain), train(planned)) == []
    assert abs(measured_peak(planned) / plan.peak_bytes - 1) < 0.01
    (graphs,) = [graphs for _, _, graphs in runner_of(planned.model).backend.graphs]
    sliced = [node for node in graphs.backward.graph.nodes if node.target is in_chunks]
    assert [node.kwargs for node in sliced if node.kwargs.get("over") is not None]
