"""Micro-batches in flight, from the actions of a schedule."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.schedules import _Action

import lowtide
from lowtide.parallel.microbatches import most_in_flight, most_waiting_for_weights
from lowtide.torch_compat.pipelining import StageAction


def actions(stage: int, kinds: str) -> list[StageAction]:
    return [StageAction(stage, kind) for kind in kinds]


@pytest.mark.parametrize(
    ("kinds", "in_flight"), [("FBFBFB", 1), ("FFBFBFBB", 2), ("FFFFBBBB", 4), ("FFIFIWIWW", 2)]
)
def test_most_in_flight(kinds: str, in_flight: int) -> None:
    assert most_in_flight(actions(1, kinds)) == in_flight


def test_the_first_stage_ends_a_backward_pass_with_the_weights() -> None:
    assert most_in_flight(actions(0, "FFIFIWFIWW")) == 3
    assert most_waiting_for_weights(actions(0, "FIFIWW")) == 0
    assert most_waiting_for_weights(actions(1, "FIFIWW")) == 2


def test_actions_of_a_schedule() -> None:
    order = {
        0: [*map(_Action.from_str, ("0F0", "0F1", "2F0", "2B0", "0B0", "0B1")), None],
        1: [None, *map(_Action.from_str, ("1F0", "1SEND_F0", "1B0", "1F1", "1B1"))],
    }
    assert lowtide.microbatches_in_flight(SimpleNamespace(pipeline_order=order)) == {0: 2, 1: 1, 2: 1}


@pytest.mark.parametrize("other", [None, nn.Linear(1, 1), SimpleNamespace(pipeline_order={})])
def test_what_is_no_schedule_is_refused(other: object) -> None:
    with pytest.raises(lowtide.LowtideError, match="a pipeline is a schedule"):
        lowtide.microbatches_in_flight(other)


def test_a_model_that_is_no_stage_is_refused() -> None:
    order = {0: [_Action.from_str("0F0"), _Action.from_str("0B0")]}
    stage = SimpleNamespace(submod=nn.Linear(1, 1), stage_index=0, is_first=True, is_last=True)
    schedule = SimpleNamespace(pipeline_order=order, _stage=stage, _n_microbatches=1)
    with pytest.raises(
        lowtide.LowtideError, match="no stage of this pipeline on this process has this model"
    ):
        lowtide.profile(nn.Linear(1, 1), torch.ones(1, 1), pipeline=schedule)
    with pytest.raises(lowtide.LowtideError, match="leave calls out"):
        lowtide.profile(stage.submod, torch.ones(1, 1), pipeline=schedule, calls=2)
    assert lowtide.profile(stage.submod, torch.ones(1, 1), pipeline=schedule).step.pipeline


def test_what_no_stage_can_have_is_refused_where_one_microbatch_is_in_flight_too(tmp_path: Path) -> None:
    order = {0: [_Action.from_str("0F0"), _Action.from_str("0B0")]}
    stage = SimpleNamespace(submod=nn.Linear(1, 1), stage_index=0, is_first=True, is_last=True)
    schedule = SimpleNamespace(pipeline_order=order, _stage=stage, _n_microbatches=1)
    with pytest.raises(lowtide.LowtideError, match="a stage of a pipeline: leave offload or pipeline out"):
        lowtide.profile(stage.submod, torch.ones(1, 1), pipeline=schedule, offload=f"disk:{tmp_path}")
