"""Models that call torch.utils.checkpoint: the baseline is the user's own step."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import differences, measured_peak, train, twin

import lowtide
from lowtide.facts import Region
from lowtide.planning.eager_checkpoints import with_own_checkpoints
from lowtide.planning.simulate import eager_runs, is_remat
from lowtide.zoo.targets import Target

ROWS, WIDTH, BLOCKS = 1024, 32, 4


class Checkpointed(nn.Module):
    """Every block but the last is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        inside = (
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )
        self.blocks = nn.ModuleList(inside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:-1]:
            x = x + checkpoint(block, x, use_reentrant=False)
        return (x + self.blocks[-1](x)).square().mean()


def target() -> Target:
    torch.manual_seed(0)
    model = Checkpointed()
    return Target("model", model, torch.randn(ROWS, WIDTH), torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.fixture(scope="module")
def profile() -> lowtide.Profile:
    own = target()
    return lowtide.profile(own.model, own.batch, optimizer=own.optimizer)


def test_the_baseline_is_the_step_with_the_calls(profile: lowtide.Profile) -> None:
    assert abs(profile.peak_bytes / measured_peak(target()) - 1) < 0.01


def test_a_share_is_one_of_the_users_own_step(profile: lowtide.Profile) -> None:
    plain = target()
    planned = twin(plain)
    plan = profile.plan("85%")
    plan.apply(planned.model)
    assert measured_peak(planned) <= 0.85 * measured_peak(plain)
    assert differences(train(plain), train(planned)) == []
    assert any("torch.utils.checkpoint" in note for note in plan.solution.notes)


def test_each_call_runs_again_once_where_its_backward_pass_begins(profile: lowtide.Profile) -> None:
    step = profile.step
    runs = with_own_checkpoints(step, eager_runs(step))
    again = [run for run in runs if is_remat(step, run)]
    assert len(again) == len(set(again)) > 0
    assert {step.nodes[run.rank].own_checkpoint for run in again} == set(range(1, BLOCKS))
    first = runs.index(again[0])
    own = {node.own_checkpoint for node in step.nodes[: step.first_backward_rank]}
    assert own == {0, *range(1, BLOCKS)}
    # the block after the last call has its backward pass first
    assert any(step.nodes[run.rank].region is Region.BACKWARD for run in runs[:first])
