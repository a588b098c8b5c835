"""Budgets of bytes that an accelerator's allocator reserves."""

from dataclasses import replace

import pytest
from synthetic import transformer

from lowtide.cli.option_values import bytes_budget
from lowtide.errors import BadSize, BudgetTooSmall, LowtideError
from lowtide.facts.serial import solution_from_dict, solution_to_dict
from lowtide.facts.sizes import check_budget, parse_budget, split_reserved
from lowtide.planning.repeated_graphs import planner_for
from lowtide.planning.reserved_budget import solve_on_device
from lowtide.profiles import Profile

MIB = 1 << 20


@pytest.fixture(scope="module")
def profile() -> Profile:
    step = transformer(layers=4, width=256, heads=4, batch=16, length=256)
    return Profile(replace(step, device="cuda:0"))


def test_the_word_at_the_end_decides():
    assert split_reserved("20GiB reserved") == ("20GiB ", True) and split_reserved("80%reserved")[1]
    assert split_reserved("20GiB") == ("20GiB", False) and split_reserved(7) == (7, False)
    check_budget("20GiB reserved")
    for bad in ("reserved", "20GiB reserve", "20GiB reserved please"):
        with pytest.raises(BadSize):
            check_budget(bad)
    with pytest.raises(BadSize):
        parse_budget("20GiB reserved", whole=1)


def test_a_plan_stays_within_a_budget_of_reserved_bytes(profile):
    base = profile.plan("100%").solution.reserved.baseline_bytes
    for share in (100, 90, 80, 70):
        plan = profile.plan(f"{share}% reserved")
        reserved = plan.solution.reserved
        assert reserved.budget_bytes == plan.reserved_budget_bytes == base * share // 100
        assert plan.peak_bytes <= reserved.least_bytes <= reserved.most_bytes <= reserved.budget_bytes
        assert plan.peak_bytes <= plan.budget_bytes <= reserved.budget_bytes
    assert f"{share / 100 * base / MIB:.1f} MiB reserved" in repr(plan)
    assert "reserved" in plan.summary()
    assert solution_from_dict(solution_to_dict(plan.solution)) == plan.solution


def test_a_budget_of_live_bytes_says_what_is_reserved(profile):
    plan = profile.plan("70%")
    assert plan.reserved_budget_bytes is None and plan.reserved_bytes >= plan.peak_bytes
    assert "by the allocator, predicted" in plan.summary() and "reserved" not in repr(plan)


def test_all_of_the_baselines_peak_is_enough(profile):
    """The blocks of temporaries are larger than the temporaries, and more so in a schedule than in eager."""
    nodes = tuple(
        replace(node, workspace_bytes=node.workspace_bytes + 3000, extra_eager_bytes=-2999)
        for node in profile.step.nodes
    )
    rounded = Profile(replace(profile.step, nodes=nodes))
    budget_bytes = rounded.peak_bytes
    assert budget_bytes > rounded.timeline.peak_bytes
    planner = planner_for(rounded.step)
    found = solve_on_device(
        rounded.step,
        lambda _: planner.solve(budget_bytes=budget_bytes + 4096, planner="none"),
        eager=lambda: planner.eager_solution("none", budget_bytes),
        budget_bytes=budget_bytes,
        reserved_budget_bytes=None,
        environment={},
    )
    assert found.eager and found.peak_bytes == found.baseline_peak_bytes == found.budget_bytes == budget_bytes


def test_expandable_segments_are_predicted_where_the_environment_asks_for_them(profile, monkeypatch):
    plain = profile.plan("60%")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    growing = profile.plan("60%")
    assert growing.solution.reserved.expandable_segments and not plain.solution.reserved.expandable_segments
    assert growing.peak_bytes <= growing.reserved_bytes != plain.reserved_bytes
    assert "with expandable segments" in growing.summary()


def test_the_least_is_named_and_can_be_had(profile):
    with pytest.raises(BudgetTooSmall, match="the least that a plan was found to reserve is") as caught:
        profile.plan("3MiB reserved")
    assert caught.value.of == "reserved"
    assert profile.plan(f"{caught.value.floor_bytes} reserved").solution.reserved.least_bytes


def test_on_a_cpu_nothing_is_reserved(profile):
    on_cpu = Profile(replace(profile.step, device="cpu"))
    assert on_cpu.plan("70%").solution.reserved is None
    assert "reserved" not in solution_to_dict(on_cpu.plan("70%").solution)
    with pytest.raises(LowtideError, match="leave 'reserved' out, or move model and batch") as caught:
        on_cpu.plan("20GiB reserved")
    assert "\n" not in str(caught.value)


def test_compiled_plans_and_sweeps_have_no_such_budget(profile):
    with pytest.raises(LowtideError, match="reserved bytes are predicted for executor 'eager' alone"):
        profile.plan("20GiB reserved", executor="inductor")
    with pytest.raises(Exception, match="sizes are compared by live bytes, so leave 'reserved' out"):
        bytes_budget("20GiB reserved")


@pytest.mark.parametrize("width", [256, 192])
def test_a_floor_in_blocks_is_reached(width):
    """A schedule of the fewest live bytes can need larger blocks, which no budget of live bytes shows."""
    step = transformer(layers=3, width=width, heads=4, batch=16, length=200)
    profile = Profile(replace(step, device="cuda:0"))
    assert profile.plan(profile.floor_bytes).peak_bytes <= profile.floor_bytes
    with pytest.raises(BudgetTooSmall) as refused:
        profile.plan(profile.floor_bytes // 2)
    assert profile.plan(refused.value.floor_bytes).peak_bytes <= refused.value.floor_bytes
