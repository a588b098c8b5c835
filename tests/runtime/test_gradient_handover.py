"""Gradients that leave a backward pass one after the other: all of autograd holds as in eager."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from nets import breaks
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import lowtide
from lowtide.ops.direct import direct_parts, hand_over
from lowtide.runtime import graph_call

pytestmark = pytest.mark.slow

Results = list[Any]


@pytest.fixture(scope="module")
def plan() -> lowtide.Plan:
    return lowtide.profile(Layers(), torch.randn(64, 8)).plan("95%")


@pytest.fixture(autouse=True)
def group(tmp_path: Any) -> Iterator[None]:
    """A process group of this process alone: DistributedDataParallel works, and nobody is waited for."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many gradients came with each part of a backward pass."""
    seen: list[int] = []
    advance = graph_call.Chain._advance

    def count(chain: graph_call.Chain) -> list[Any]:
        gradients = advance(chain)
        seen.append(len(gradients))
        return gradients

    monkeypatch.setattr(graph_call.Chain, "_advance", count)
    return seen


class Layers(nn.Module):
    def __init__(self, middle: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 8)
        self.middle = middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.norm(torch.relu(self.first(x)))))


def grads(model: nn.Module) -> Results:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def kept(model: nn.Module, x: torch.Tensor) -> Results:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return grads(model)


def two_calls(model: nn.Module, x: torch.Tensor) -> Results:
    (model(x).sum() * model(x + 1).square().mean()).backward()
    return grads(model)


def hooked(model: nn.Module, x: torch.Tensor) -> Results:
    names: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient: gradient * 3)
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: names.append(name))
    model(x).square().mean().backward()
    return [*grads(model), names]


def of_some(model: nn.Module, x: torch.Tensor) -> Results:
    wanted = [p for name, p in model.named_parameters() if "norm" in name]
    return list(torch.autograd.grad(model(x).square().mean(), wanted))


def of_the_input(model: nn.Module, x: torch.Tensor) -> Results:
    x = x.clone().requires_grad_()
    model(x).square().mean().backward()
    return [x.grad, *grads(model)]


def frozen(model: nn.Module, x: torch.Tensor) -> Results:
    model(x).square().mean().backward()
    assert all(p.grad is None for name, p in model.named_parameters() if "first" in name)
    return grads(model)


def accumulated(model: nn.Module, x: torch.Tensor) -> Results:
    for _ in range(3):
        model(x).square().mean().backward()
    return grads(model)


def under_autocast(model: nn.Module, x: torch.Tensor) -> Results:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).square().mean()
    loss.backward()
    return grads(model)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "step",
    [kept, two_calls, hooked, of_some, of_the_input, frozen, accumulated, under_autocast],
    ids=lambda step: step.__name__,
)
def test_autograd_holds_as_in_eager(
    step: Callable[..., Results], plan: lowtide.Plan, handed: list[int]
) -> None:
    torch.manual_seed(0)
    net, x = Layers(), torch.randn(64, 8)
    planned = plan.apply(copy.deepcopy(net))
    for model in (net, planned):
        model.first.requires_grad_(step is not frozen)
    expected, found = step(DDP(net), x), step(DDP(planned), x)
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert handed or step is kept  # where the graph is kept, all gradients come at once


def test_gradients_come_one_layer_after_the_other(plan: lowtide.Plan, handed: list[int]) -> None:
    net, x = Layers(), torch.randn(64, 8)
    planned = DDP(plan.apply(net))
    planned(x).square().mean().backward()
    assert handed == [1, 1, 2, 1, 1]


class Added(nn.Module):
    """Parameters of the batch's shape, whose gradient is the one that the layer before them reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 64)
        self.near, self.far = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.last(torch.tanh(self.first(x + self.far))) + self.far + self.near).tanh()


def test_gradients_arrive_in_eagers_order(handed: list[int]) -> None:
    torch.manual_seed(0)
    net, x = Added(), torch.randn(64, 64)
    planned = lowtide.checkpoint(DDP(copy.deepcopy(net)), x, budget="100%")
    expected, found = hooked(DDP(net), x), hooked(planned, x)
    assert found[-1] == expected[-1]
    assert all(torch.equal(a, b) for a, b in zip(found[:-1], expected[:-1], strict=True))
    assert len(handed) > 1


def test_a_model_of_several_graphs_hands_over_in_each(handed: list[int]) -> None:
    torch.manual_seed(0)
    net, x = Layers(middle=breaks), torch.randn(64, 8)
    planned = DDP(lowtide.checkpoint(copy.deepcopy(net), x, budget="95%"))
    plain = DDP(net)
    for model in (plain, planned):
        model(x).square().mean().backward()
    assert all(torch.equal(a, b) for a, b in zip(grads(plain), grads(planned), strict=True))
    assert sum(handed) > len(list(net.parameters()))  # what passes between the graphs, too


def test_a_parameter_that_changes_before_backward_is_noticed(plan: lowtide.Plan) -> None:
    net, x = Layers(), torch.randn(64, 8)
    planned = DDP(plan.apply(net))
    loss = planned(x).square().mean()
    with torch.no_grad():
        net.last.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_differentiating_twice_is_refused_as_without_ddp(plan: lowtide.Plan) -> None:
    net, x = Layers(), torch.randn(64, 8)
    planned = DDP(plan.apply(net))
    first = torch.autograd.grad(planned(x).square().mean(), list(net.parameters()), create_graph=True)
    with pytest.raises(lowtide.Unsupported, match="differentiates a gradient of the planned model"):
        sum(gradient.sum() for gradient in first).backward()


def test_nothing_is_handed_over_without_ddp(plan: lowtide.Plan, handed: list[int]) -> None:
    net, x = Layers(), torch.randn(64, 8)
    plan.apply(net)(x).square().mean().backward()
    assert handed == []


def test_a_graph_in_parts_keeps_nothing_of_what_it_handed_over() -> None:
    graph = fx.Graph()
    value, box = graph.placeholder("value"), graph.placeholder("box")
    double = graph.call_function(torch.ops.aten.mul.Tensor, (value, 2))
    graph.call_function(hand_over, (box, double))
    graph.call_function(hand_over, (box, graph.call_function(torch.ops.aten.neg.default, (value,))))
    graph.output([])
    out: list[torch.Tensor] = []
    parts = direct_parts(fx.GraphModule(nn.Module(), graph))([torch.ones(3), out])
    assert out == []
    next(parts)
    assert torch.equal(out[0], torch.full((3,), 2.0))
    reference = out[0].untyped_storage()
    assert torch._C._storage_Use_Count(reference._cdata) == 2  # that of `out`, and of `reference`
    next(parts)
    assert len(out) == 2


def test_a_gradient_that_is_still_read_waits() -> None:
    graph = fx.Graph()
    tangent = graph.placeholder("tangent")
    first = graph.call_function(torch.ops.aten.neg.default, (tangent,))
    middle = graph.call_function(torch.ops.aten.cos.default, (tangent,))
    last = graph.call_function(torch.ops.aten.mul.Tensor, (first, middle))
    graph.output([first, last, None])
    in_parts = graph_call.with_handovers(fx.GraphModule(nn.Module(), graph), ((0,), (1,)))
    names = [node.name for node in in_parts.graph.nodes if node.op == "call_function"]
    assert names == ["neg_default", "cos_default", "mul_tensor", "hand_over", "hand_over_1"]
