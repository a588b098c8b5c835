"""Gradients of parameters run before those of what the layer read, where that holds less."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.analyze.backward_facts import backward_order
from lowtide.analyze.captured_step import capture
from lowtide.facts import Region
from lowtide.planning.schedules import scheduled_ranks
from lowtide.planning.simulate import baseline_runs, eager_runs, simulate, simulate_unchecked


class Layers(nn.Module):
    """Wide inside, so that the peak is where a layer's gradients are made, whose input nothing else reads."""

    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        self.rise = nn.Linear(64, 256)
        self.norm = nn.LayerNorm(256)
        self.fall = nn.Linear(256, 64)
        self.again = self.fall if shared else nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fall(self.norm(self.rise(x)))
        return self.again(self.norm(self.rise(x))).square().mean()


def trained(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()] + [p.grad.clone() for p in model.parameters()]


def test_a_layers_input_is_freed_before_its_gradient_is_made() -> None:
    step = lowtide.profile(Layers(), torch.randn(512, 64)).step
    planned, eager = baseline_runs(step), eager_runs(step)
    assert planned != eager
    assert sorted(planned) == sorted(eager)
    assert simulate(step, planned).peak_bytes < simulate_unchecked(step, eager).peak_bytes


def test_gradients_leave_in_eagers_order() -> None:
    (segment, *_) = capture(Layers(shared=True), torch.randn(512, 64)).segments
    captured, ordered = segment.backward_ops, backward_order(segment)
    grads = set(segment.gradients)
    assert ordered != captured
    assert [node for node in ordered if node in grads] == [node for node in captured if node in grads]
    seen: set[torch.fx.Node] = set()
    for node in ordered:
        assert all(source in seen for source in node.all_input_nodes if source in captured)
        seen.add(node)


def test_schedules_count_ops_as_captured() -> None:
    step = lowtide.profile(Layers(), torch.randn(512, 64)).step
    ranks = scheduled_ranks(step)[0]
    backward = [rank for rank in ranks if step.nodes[rank].region is Region.BACKWARD]
    places = [step.nodes[rank].eager_place for rank in backward]
    assert places == sorted(places)
    assert backward != sorted(backward)


@pytest.mark.sample(3)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("share", ["100%", "80%", "floor"])
def test_training_in_another_order_has_eagers_bits(shared: bool, share: str) -> None:
    batch = torch.randn(512, 64)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Layers(shared=shared))
    plain, planned = models
    profile = lowtide.profile(planned, batch)
    profile.plan(profile.floor_bytes if share == "floor" else share).apply(planned)
    for one, other in zip(trained(plain, batch), trained(planned, batch), strict=True):
        assert torch.equal(one, other)
