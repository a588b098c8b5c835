"""The end of a chain of pointwise ops, brought back a slice at a time."""

from collections.abc import Iterator

import pytest
import torch
from plans_by_hand import by_hand
from torch import nn
from training import differences, measured_peak, train, twin

import lowtide
from lowtide.running.runner import runner_of
from lowtide.torchside.ops.chains import in_slices
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow


@pytest.fixture(params=[1, 2])
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chain_comes_back_in_slices(dtype: torch.dtype, threads: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(513), Block(513)).to(dtype)
    batch = torch.randn(1024 * threads + 3, 16, dtype=dtype)
    plain = Target("model", model, batch, torch.optim.SGD(model.parameters(), lr=0.1))
    planned = twin(plain)
    found = lowtide.profile(planned.model, planned.batch, optimizer=planned.optimizer)
    ends = [node for node in found.nodes if node.recipe("slices") is not None]
    # the factor of the gradient is read in backward, the end of the chain by the next layer's weights
    assert {node.op for node in ends} == {"aten.tanh.default", "aten.add.Tensor", "aten.mul.Tensor"}
    plan = by_hand(found, "slices")
    assert plan.peak_bytes < found.peak_bytes
    plan.apply(planned.model)
    assert differences(train(plain), train(planned)) == []
    assert abs(measured_peak(planned) / plan.peak_bytes - 1) < 0.01
    (graphs,) = [graphs for _, _, graphs in runner_of(planned.model).backend.graphs]
    assert in_slices in [node.target for node in graphs.backward.graph.nodes]
