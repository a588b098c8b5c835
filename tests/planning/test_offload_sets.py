"""Plans that offload: within the budget, never worse than without the store or with it alone, and against
all there are for small steps."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from offloadable import with_offload
from strategies import StepBuilder, links, steps
from synthetic import chain

from lowtide.errors import LowtideError
from lowtide.facts import Action, Graph, Kind, Region, Run, TransferSpeed
from lowtide.planning.offload_sets import offload_sets
from lowtide.planning.planner import Planner
from lowtide.planning.repeated_graphs import planner_for
from lowtide.planning.simulate import baseline_runs, recompute_slots, simulate
from lowtide.planning.transfer_model import can_offload
from lowtide.planning.transfer_schedule import placed
from lowtide.planning.variants import offload_alone

GRAPH = Graph(fingerprint="a", in_model=True, returned=(), missing=())


def link(bandwidth: float, latency: float = 0.0) -> TransferSpeed:
    return TransferSpeed(
        store="disk:/x",
        write_bytes_per_second=bandwidth,
        read_bytes_per_second=bandwidth,
        latency_seconds=latency,
    )


def budgets(planner: Planner, points: int = 7) -> list[int]:
    low, high = planner.floor_bytes, planner.baseline.peak_bytes
    return [low + (high - low) * i // (points - 1) for i in range(points)]


@settings(max_examples=10, deadline=None)
@given(steps(max_forward=6, offload=True).filter(can_offload))
def test_auto_is_never_worse_than_either_alone_and_never_slower_with_more(step):
    planner = planner_for(step)
    before = float("inf")
    for budget in budgets(planner):
        best, without, alone = (
            planner.best(budget),
            planner.without_offload.best(budget),
            planner.problem.once(offload_alone).best(budget),
        )
        assert best is not None
        assert best.peak_bytes <= budget
        assert best.added_seconds <= before
        assert without is None or best.added_seconds <= without.added_seconds
        assert alone is None or best.added_seconds <= alone.seconds
        assert planner.bounds.seconds(budget) <= best.added_seconds + 1e-9
        before = best.added_seconds
    assert planner.floor_bytes <= planner.without_offload.floor_bytes
    assert planner.bounds.floor_bytes <= planner.floor_bytes


def test_the_same_step_gives_the_same_plans():
    step = with_offload(chain(length=8), link(2e8))
    one, other = planner_for(step), planner_for(step)
    for budget in budgets(one, 3):
        assert one.solve(budget_bytes=budget) == other.solve(budget_bytes=budget)


def test_without_remats_to_offload_nothing_changes():
    step = chain(length=6)
    fast = replace(step, transfer_speed=link(1e9))
    assert not can_offload(fast)
    assert not can_offload(replace(with_offload(step, link(1e9)), transfer_speed=None))
    budget = Planner(step).floor_bytes
    solution = planner_for(fast).solve(budget_bytes=budget)
    assert replace(solution, offload=None) == planner_for(step).solve(budget_bytes=budget)


def test_a_fast_link_takes_what_recomputing_would_cost():
    """Bytes enough for half of the step's peak, hidden behind its compute."""
    step = with_offload(chain(length=10), link(1e9))
    planner = planner_for(step)
    assert isinstance(planner, Planner)
    solution = planner.solve(budget_bytes=planner.baseline.peak_bytes * 6 // 10)
    assert solution.offload is not None
    without = planner.without_offload.best(solution.budget_bytes)
    assert without is not None
    assert solution.recompute_seconds < without.added_seconds / 4
    assert solution.offload.stall_seconds < solution.offload.transfer_seconds / 10
    offloaded = [d for d in solution.decisions if d.action is Action.OFFLOAD]
    assert solution.offload.store_bytes == sum(d.nbytes for d in offloaded)
    on_host = replace(step, transfer_speed=replace(step.transfer_speed, store="host"))
    pinned = planner_for(on_host).solve(budget_bytes=solution.budget_bytes).offload
    assert pinned.store_bytes == sum(1 << (d.nbytes - 1).bit_length() for d in offloaded)
    by_name = {node.name: node.rank for node in step.nodes}
    for decision in offloaded:
        assert by_name[decision.released_after] >= decision.last_forward_use
        assert by_name[decision.fetched_before] <= decision.first_backward_use
        assert decision.held_bytes == 8
        assert decision.released_after in decision.reason and decision.fetched_before in decision.reason
    assert all(d.released_after == "" for d in solution.decisions if d.action is not Action.OFFLOAD)


def test_a_slow_link_is_left_alone():
    """Also between the levels of bytes for which transfers are placed."""
    build = StepBuilder(link=link(1e-3))
    value, made = build.given(1, Kind.INPUT), []
    for number in range(9):
        value = build.offloadable(build.op("op", (value,), 1000 + 137 * number**2 % 911, 1.0 + number % 4))
        made.append(value)
    gradient = build.backward()
    for rank in reversed(made):
        gradient = build.grad((gradient, rank), 5, 1.0)
    planner = planner_for(build.step())
    for budget in budgets(planner.without_offload, 40):
        best, without = planner.best(budget), planner.without_offload.best(budget)
        assert best is not None and without is not None
        assert best.added_seconds <= without.added_seconds
    solution = planner.solve(budget_bytes=planner.without_offload.floor_bytes)
    assert solution.offload is not None
    assert solution.offload.store_bytes == solution.offload.transfer_seconds == 0
    assert all(d.action is not Action.OFFLOAD for d in solution.decisions)


def test_offload_reaches_below_the_floor_of_recomputing():
    """Values that nothing can compute again leave for the store."""
    build = StepBuilder(link=link(1))
    value, made = build.given(1, Kind.INPUT), []
    for _ in range(6):
        value = build.offloadable(build.fixed("custom", (value,), 50, 10.0))
        made.append(value)
    gradient = build.backward()
    for rank in reversed(made):
        gradient = build.grad((gradient, rank), 5, 10.0)
    planner = planner_for(build.step())
    assert planner.without_offload.floor_bytes > 300
    assert planner.floor_bytes < 120
    fits = planner.solve(budget_bytes=200)
    assert fits.offload is not None
    assert 0 < fits.offload.stall_seconds == fits.recompute_seconds


def test_room_hides_transfers():
    """The same offloaded values, let go later and read back earlier where the budget allows it."""
    step = with_offload(chain(length=8, nbytes=1000), link(2e8, latency=1e-6))
    order = planner_for(step).problem.once(offload_alone).entries[0].runs
    tight = simulate(step, order).peak_bytes
    stalls = [placed(step, order, budget_bytes=tight + 1000 * room).added_seconds for room in range(6)]
    assert stalls == sorted(stalls, reverse=True)
    assert stalls[-1] < stalls[0] / 2
    for room in range(6):
        assert placed(step, order, budget_bytes=tight + 1000 * room).peak_bytes <= tight + 1000 * room


def test_transfers_have_time_to_spare_where_there_is_room():
    """A link that is slower than measured by a third adds nothing."""
    step = with_offload(chain(length=10), link(6e8))
    planner = planner_for(step)
    best = planner.best(planner.baseline.peak_bytes * 8 // 10)
    assert best is not None
    assert best.traffic is not None and best.traffic.transfers
    assert best.stall_seconds == 0
    assert simulate(replace(step, transfer_speed=link(4.2e8)), best.runs).stall_seconds == 0


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_placing_keeps_to_the_budget_and_to_the_values(data):
    step = data.draw(steps(offload=True).filter(can_offload))
    planner = planner_for(step)
    order = data.draw(
        st.sampled_from(
            list(planner.problem.once(offload_sets).rows(planner.problem.search_problem.sequence(())))
        )
    )[1]
    runs = planner.problem.search_problem.runs(order)
    smallest = placed(step, runs, budget_bytes=0)
    budget = smallest.peak_bytes + data.draw(st.integers(0, 100))
    found = placed(step, runs, budget_bytes=budget)
    assert found.peak_bytes <= budget
    again = placed(step, found.runs, budget_bytes=budget)
    assert again.runs == found.runs

    def fetched(runs):
        return sorted(run for run in runs if not run.is_first)

    assert fetched(found.runs) == fetched(smallest.runs)


def test_graphs_that_run_several_times_are_refused():
    step = with_offload(chain(length=3), link(1e9))
    with pytest.raises(LowtideError, match="leave 'offload' out"):
        planner_for(replace(step, graphs=(GRAPH, GRAPH)))


def test_a_schedule_is_carried_over_with_its_transfers():
    small = replace(with_offload(chain(length=8, nbytes=1000), link(1e9)), graphs=(GRAPH,))
    large = replace(with_offload(chain(length=8, nbytes=2000), link(1e9)), graphs=(GRAPH,))
    solution = planner_for(small).solve(
        budget_bytes=planner_for(small).problem.once(offload_alone).entries[0].peak_bytes
    )
    budget = planner_for(large).baseline.peak_bytes * 9 // 10
    found = planner_for(large).adapt([g.schedule for g in solution.graphs], budget_bytes=budget)
    assert found is not None
    assert found.peak_bytes <= budget
    assert found.graphs[0].releases


@st.composite
def tiny(draw):
    """A chain with one or two values that can be offloaded, and nothing that can be computed again."""
    build = StepBuilder(link=draw(links()))
    value, made = build.given(5), []
    count = draw(st.integers(2, 4))
    offloadable = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=2, unique=True))
    for number in range(count):
        value = build.fixed("op", (value,), draw(st.integers(5, 60)), draw(st.integers(1, 20)))
        made.append(build.offloadable(value) if number in offloadable else value)
    gradient = build.backward()
    for rank in reversed(made):
        gradient = build.grad((gradient, rank), draw(st.integers(1, 40)), draw(st.integers(1, 20)))
    return build.step()


def all_plans(step):
    """(peak, seconds) of all choices of values, places to let go of them, and places to read them back."""
    slots = recompute_slots(step)
    before = [rank for rank, slot in enumerate(slots) if slot >= 0]
    after = [n.rank for n in step.nodes if n.region is Region.FORWARD and not n.on_demand]
    leaves = [n for n in step.nodes if n.movable]
    choices = [
        [None, *((leave, a, b) for a in after if a >= leave.reads[0] for b in before)] for leave in leaves
    ]
    for chosen in product(*choices):
        some = [choice for choice in chosen if choice is not None]
        runs = []
        for run in baseline_runs(step):
            runs += [Run(leave.reads[0], "swap") for leave, _, b in some if b == run.rank]
            runs.append(run)
            runs += [Run(leave.rank) for leave, a, _ in some if a == run.rank]
        timeline = simulate(step, runs)
        yield timeline.peak_bytes, timeline.added_seconds


@seed(1)
@settings(max_examples=20, deadline=None, database=None)
@given(tiny())
def test_hardly_a_schedule_of_a_small_step_is_better(step):
    plans = list(all_plans(step))
    planner = planner_for(step)
    for budget in sorted({peak for peak, _ in plans}):
        found = planner.best(budget)
        least = min(seconds for peak, seconds in plans if peak <= budget)
        assert found is not None
        assert found.added_seconds <= 1.15 * least + 1e-9
        assert planner.bounds.seconds(budget) <= least + 1e-9
