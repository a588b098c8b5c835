"""Steps whose backward ops can run in other ways: what is chosen, and that it never costs anything."""

from dataclasses import replace

import pytest
from synthetic import Net

from lowtide.errors import BudgetTooSmall
from lowtide.experiments.profiled_sizes import SizeInBudget
from lowtide.facts import Region, Remat, Run, Step
from lowtide.planning.planner import Planner
from lowtide.planning.repeated_graphs import planner_for
from lowtide.planning.simulate import baseline_runs, check_runs, replaced_ranks, simulate
from lowtide.planning.variants import variants, with_chunks, without_dominated
from lowtide.profiles import Profile

NBYTES = 1 << 20


def formulas(*, extra_seconds: float = 1e-4, sizes: bool = False) -> Step:
    """Layers with a formula of three ops each, whose gradient can run at once from the formula's input."""
    net = Net()
    x = net.parameter(NBYTES)
    for _ in range(3):
        x = net.linear(x, NBYTES, 4096, 1e7)
        for op in ("first", "second", "third"):
            x = net.pointwise(op, x, saves="out")
    step = net.finish(net.linear(x, NBYTES, 4096, 1e7))
    nodes = list(step.nodes)
    for node in step.nodes:
        if node.op != "first_backward":
            continue
        second = nodes[node.reads[0]]
        third = nodes[second.reads[0]]
        formula_input = nodes[node.reads[1]].reads[0]
        remat = Remat(
            rule="slices",
            reads=(formula_input, third.reads[0]),
            holds=node.holds,
            makes=node.makes,
            seconds=node.seconds + second.seconds + third.seconds + extra_seconds,
            workspace_bytes=2 * NBYTES,
        )
        large = replace(remat, rule="large", workspace_bytes=3 * NBYTES, seconds=remat.seconds / 2)
        nodes[node.rank] = replace(node, remats=(remat, large) if sizes else (remat,))
        for rank in (node.rank, second.rank, third.rank):
            nodes[rank] = replace(nodes[rank], workspace_bytes=4 * NBYTES)
    return replace(step, nodes=tuple(nodes))


def ends(step: Step) -> list[int]:
    return [node.rank for node in step.nodes if node.remats and node.region is Region.BACKWARD]


def test_a_chain_stands_in_for_the_ops_between_it_and_what_it_reads() -> None:
    step = formulas()
    assert [v.name for v in variants(step)] == ["op by op, offload never", "smallest chunks, offload never"]
    (first, *_) = ends(step)
    inner = replaced_ranks(step, Run(first, "slices"))
    assert [step.nodes[rank].op for rank in inner] == ["third_backward", "second_backward"]
    assert replaced_ranks(step, Run(first)) == ()
    runs = [Run(run.rank, "slices") if run.rank == first else run for run in baseline_runs(step)]
    with_inner = simulate(step, [run for run in runs if run.rank not in inner])
    assert with_inner.added_seconds == pytest.approx(1e-4)
    with pytest.raises(ValueError, match="has not run"):
        check_runs(step, [run for run in baseline_runs(step) if run.rank not in inner])


@pytest.mark.parametrize("extra_seconds", [1e-4, -1e-4])
def test_never_worse_than_without_and_monotone(extra_seconds: float) -> None:
    step = formulas(extra_seconds=extra_seconds)
    planner, without = planner_for(step), Planner(step)
    assert planner.floor_bytes < without.floor_bytes
    low, high = planner.floor_bytes, planner.eager_peak_bytes
    found = [planner.solve(budget_bytes=low + (high - low) * i // 12) for i in range(13)]
    seconds = [solution.recompute_seconds for solution in found]
    assert seconds == sorted(seconds, reverse=True)
    for solution in found:
        timeline = simulate(step, solution.schedule.runs)
        assert timeline.peak_bytes == solution.peak_bytes <= solution.budget_bytes
        assert solution.recompute_seconds == max(0.0, timeline.added_seconds)
        assert solution.lower_bound_seconds is not None
        assert 0 <= solution.lower_bound_seconds <= solution.recompute_seconds
        other = without.best(solution.budget_bytes)
        assert other is None or solution.recompute_seconds <= other.added_seconds
    with pytest.raises(BudgetTooSmall) as caught:
        planner.solve(budget_bytes=low - 1)
    assert caught.value.floor_bytes == low
    assert planner.solve(budget_bytes=high, planner="mu-two").schedule.runs == baseline_runs(step)


def test_what_a_chain_makes_inside_of_itself_is_said_to_be_recomputed() -> None:
    planner = planner_for(formulas())
    solution = planner.solve(budget_bytes=planner.floor_bytes)
    inside = [row for row in solution.decisions if "inside of 'first_backward" in row.reason]
    assert inside and all((row.action, row.method) == ("RECOMPUTE", "slices") for row in inside)


def test_larger_slices_are_taken_where_they_are_faster_and_fit() -> None:
    planner = planner_for(formulas(sizes=True))
    at_floor, at_ease = (
        {
            run.rule
            for run in planner.solve(budget_bytes=budget).schedule.runs
            if run.rank in ends(planner.step)
        }
        for budget in (planner.floor_bytes, planner.eager_peak_bytes)
    )
    assert at_floor == {"slices"} and at_ease == {"large"}


def test_a_size_that_holds_more_and_is_hardly_faster_is_not_looked_at() -> None:
    step = formulas()
    node = next(node for node in step.nodes if node.remats and node.region is Region.FORWARD)
    (remat,) = node.remats
    for seconds, is_left in ((0.95, False), (0.5, True)):
        large = replace(remat, rule="large", seconds=seconds * remat.seconds, workspace_bytes=10)
        nodes = list(step.nodes)
        nodes[node.rank] = replace(node, remats=(remat, large))
        looked_at = without_dominated(replace(step, nodes=tuple(nodes))).nodes[node.rank].remats
        assert (large in looked_at) is is_left


def test_a_choice_is_a_step_of_its_own() -> None:
    step = formulas()
    choice = tuple(Run(rank, "slices") for rank in ends(step))
    alone = simulate(with_chunks(step, choice), baseline_runs(step))
    inner = {rank for run in choice for rank in replaced_ranks(step, run)}
    runs = [dict(choice).get(run.rank, "") for run in baseline_runs(step)]
    same = [Run(run.rank, how) for run, how in zip(baseline_runs(step), runs, strict=True)]
    assert simulate(step, [run for run in same if run.rank not in inner]).peak_bytes == alone.peak_bytes


def test_what_is_proven_of_a_budget_holds_for_all_ways() -> None:
    profile = Profile(formulas())
    assert profile.floor_bound_bytes is not None
    assert profile.floor_bound_bytes <= profile.floor_bytes < profile.bounds.floor_bytes
    assert SizeInBudget(profile=profile, budget_bytes=profile.floor_bytes).fits
    assert SizeInBudget(profile=profile, budget_bytes=profile.floor_bound_bytes - 1).has_none


def test_other_planners_know_what_auto_reaches_with_chunks() -> None:
    planner = planner_for(formulas())
    with pytest.raises(BudgetTooSmall, match="planner 'auto' meets this budget"):
        planner.solve(budget_bytes=planner.floor_bytes, planner="none")
    solution = planner.solve(budget_bytes=planner.eager_peak_bytes, planner="mu-two")
    assert solution.floor_bound_bytes is not None and solution.floor_bound_bytes <= planner.floor_bytes
