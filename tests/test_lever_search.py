"""What a refusal names: settings of the loop that lower the floor, each with the floor of its plans."""

import traceback

import pytest
import torch
from torch import nn

import lowtide
from lowtide.facts.levers import Lever, lever_lines, lowering
from lowtide.lever_search import HALF


class Head(nn.Module):
    """A loss over many classes, and the logits that a loop may keep."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(64, 64), nn.Tanh())))
        self.head = nn.Linear(64, 512)

    def forward(self, x, y):
        logits = self.head(self.body(x))
        return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}


def make(batch_size, *, depth=2):
    model = Head(depth)
    batch = (torch.randn(batch_size, 64), torch.randint(512, (batch_size,)))
    return model, batch, torch.optim.Adam(model.parameters())


@pytest.fixture(scope="module")
def loop():
    return make(96)


@pytest.fixture(scope="module")
def refusal(loop):
    model, batch, optimizer = loop
    profile = lowtide.profile(model, batch, optimizer=optimizer)
    with pytest.raises(lowtide.BudgetTooSmall) as caught:
        profile.plan(profile.floor_bytes - 1)
    return caught.value


def test_floors_are_those_of_a_profile_with_the_setting(loop, refusal):
    model, batch, optimizer = loop
    floors = {lever.keywords: lever.floor_bytes for lever in refusal.levers}
    for name, value in (("step_in_backward", True), ("holds_outputs", False)):
        with_it = lowtide.profile(model, batch, optimizer=optimizer, **{name: value})
        assert floors[f"{name}={value}",] == with_it.floor_bytes
        assert with_it.plan(with_it.floor_bytes).peak_bytes <= with_it.floor_bytes


def test_only_levers_that_lower_the_floor_are_named_the_lowest_first(refusal):
    floors = [lever.floor_bytes for lever in refusal.levers]
    assert floors == sorted(floors)
    assert max(floors) < refusal.floor_bytes
    together = refusal.levers[0]
    assert {"step_in_backward=True", "holds_outputs=False"} <= set(together.keywords)


def test_the_message_is_one_line_and_a_traceback_shows_the_levers(refusal):
    assert len(str(refusal).splitlines()) == 1
    assert "Try" not in str(refusal)
    shown = "".join(traceback.format_exception(refusal))
    assert "  step_in_backward=True\n" in shown
    assert "not where gradients are clipped by norm" in shown
    assert all(len(line) <= 80 for line in refusal.__notes__)


@pytest.mark.long
def test_warnings_of_the_capture_are_not_given_again(caplog):
    model, x = nn.Linear(32, 8), torch.randn(64, 32)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(lowtide.BudgetTooSmall) as refused:
        lowtide.profile(model, x, optimizer=optimizer).plan(4000)
    assert refused.value.levers
    assert len([record for record in caplog.records if "needs a closure" in record.getMessage()]) == 1


def test_a_step_in_backward_is_not_named_where_gradients_accumulate(loop):
    model, batch, optimizer = loop
    with pytest.raises(lowtide.BudgetTooSmall) as caught:
        lowtide.checkpoint(model, batch, budget="10KB", optimizer=optimizer, accumulate=True)
    named = {keyword for lever in caught.value.levers for keyword in lever.keywords}
    assert "step_in_backward=True" not in named
    assert "holds_outputs=False" in named


def test_an_optimizer_step_that_sets_the_floor_names_lighter_steps():
    model, batch, optimizer = make(2)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    with pytest.raises(lowtide.BudgetTooSmall) as caught:
        lowtide.profile(model, batch, optimizer=optimizer).plan("10KB")
    options = {keyword: lever for lever in caught.value.levers for keyword in lever.keywords}
    assert options["fused=True in the optimizer"].floor_bytes < caught.value.floor_bytes
    assert HALF not in options  # the batch has no part in it
    assert optimizer.param_groups[0]["foreach"] is True
    assert not optimizer.param_groups[0]["fused"]


def test_without_the_batch_there_are_no_levers_but_a_smaller_one():
    model, batch, optimizer = make(400)
    profile = lowtide.profile(model, batch, optimizer=optimizer)
    del batch
    with pytest.raises(lowtide.BudgetTooSmall) as caught:
        profile.plan("10KB")
    assert [lever.keywords for lever in caught.value.levers] == [(HALF,)]


def test_another_planner_names_none_where_auto_meets_the_budget():
    model, batch, optimizer = make(400, depth=6)
    profile = lowtide.profile(model, batch, optimizer=optimizer)
    with pytest.raises(lowtide.BudgetTooSmall, match="planner 'auto' meets this budget") as caught:
        profile.plan(profile.floor_bytes, "none")
    assert caught.value.levers == ()


def lever(floor_bytes, *keywords, **fields):
    options = tuple(f"--{keyword}" for keyword in keywords)
    return Lever(keywords=keywords, options=options, floor_bytes=floor_bytes, **fields)


def test_several_changes_are_left_out_where_one_alone_reaches_as_much():
    both, one, other = lever(50, "a", "b"), lever(50, "a"), lever(100, "b")
    assert lowering([both, other, one], floor_bytes=100) == (one,)
    assert lowering([other], floor_bytes=100) == ()


def test_less_than_half_a_percent_is_not_lower():
    one, more, slight = lever(5000, "a"), lever(4999, "a", "b"), lever(9990, "c")
    assert lowering([more, one, slight], floor_bytes=10_000) == (one,)


def test_lines_say_what_fits_what_is_estimated_and_what_the_command_line_lacks():
    levers = [
        lever(1 << 20, "a", is_estimate=True),
        Lever(keywords=("b",), options=("",), floor_bytes=3 << 20),
    ]
    assert lever_lines(levers, budget_bytes=2 << 20, as_options=True) == [
        "lowest reachable peak with",
        "  about 1.0 MiB  fits  --a",
        "        3.0 MiB        b (in Python)",
    ]
    assert lever_lines([], budget_bytes=1) == []
