"""No plan adds less than a bound says, nor holds less: checked against every schedule of small steps."""

from math import inf
from random import Random

import pytest
from exact import least_peak, least_seconds, random_step
from hypothesis import given, settings
from strategies import StepBuilder, steps
from synthetic import chain, transformer, unet

from lowtide.errors import BudgetTooSmall
from lowtide.planning.lower_bounds import Bounds
from lowtide.planning.planner import Planner
from lowtide.planning.search.table import Table


def budgets(low, high):
    return sorted({low, *(low + (high - low) * i // 3 for i in (1, 2)), max(low, high - 1)})


def check_instances(seeds, *, most=5, **kinds):
    """How many plans there were, how many of them optimal; and how many floors, how many of them found."""
    plans = optimal = found = 0
    for seed in seeds:
        step = random_step(Random(seed), most=most, **kinds)
        planner = Planner(step)
        low = least_peak(step)
        assert planner.bounds.floor_bytes <= low <= planner.floor().floor_bytes, seed
        assert planner.bounds.seconds(planner.bounds.floor_bytes - 1) == inf
        found += low == planner.floor().floor_bytes
        for budget in budgets(low, planner.baseline.peak_bytes):
            best = least_seconds(step, budget)
            assert planner.bounds.seconds(budget) <= best + 1e-9, (seed, budget)
            try:
                solution = planner.solve(budget_bytes=budget)
            except BudgetTooSmall:
                continue
            plans += 1
            assert best - 1e-9 <= solution.recompute_seconds, (seed, budget)
            assert solution.lower_bound_seconds <= best + 1e-9
            optimal += solution.recompute_seconds <= best + 1e-9
    return plans, optimal, len(seeds), found


def test_bounds_hold_and_plans_of_small_steps_are_optimal():
    plans, optimal, floors, found = check_instances(range(20), most=4)
    assert optimal >= 0.99 * plans
    assert found == floors


@pytest.mark.parametrize(
    "seeds", [(500, *range(502, 508)), pytest.param((501,), marks=pytest.mark.long)], ids=["short", "long"]
)
def test_bounds_hold_where_results_are_written_over_what_is_read_last(seeds):
    plans, optimal, floors, found = check_instances(seeds, most=4, overwrites=True)
    assert optimal >= 0.99 * plans
    assert found == floors


def test_bounds_hold_where_only_some_readers_can_do_with_less():
    plans, optimal, floors, found = check_instances(range(600, 612), most=4, signs=True)
    assert plans > 20
    assert optimal >= 0.99 * plans
    assert found == floors


@pytest.mark.long
def test_bounds_hold_for_a_thousand_instances():
    plans, optimal, floors, found = check_instances(range(40, 420))
    assert plans >= 1000
    assert optimal >= 0.99 * plans
    assert found >= 0.99 * floors


def kept_mask_step():
    """A dropout whose result comes back from its input and its mask, which a plan has to keep for it."""
    build = StepBuilder()
    source = build.given(8)
    first = build.op("a", (source,), 40, 10)
    out, mask = build.dropout(first, 40, 8)
    wide = build.op("b", (out,), 60, 10)
    start = build.backward()
    one = build.grad((start, wide), 10, 1)
    two = build.grad((one, out), 10, 1)
    build.grad((two, mask, first), 10, 1)
    return build.step()


def test_a_bound_holds_for_every_method_of_bringing_a_value_back():
    step = kept_mask_step()
    bounds = Bounds(Table(step))
    low = least_peak(step)
    assert bounds.floor_bytes <= low
    for budget in range(low, Planner(step).baseline.peak_bytes):
        assert bounds.seconds(budget) <= least_seconds(step, budget) + 1e-9, budget


def test_a_kept_form_bounds_what_holding_its_value_costs():
    """Of a value that can be kept as a quarter of its bytes, only that quarter must be held."""
    build = StepBuilder()
    source = build.given(8)
    big = build.packed(source, 400, 100)
    late = build.op("late", (big,), 10, 1)
    wide = build.op("wide", (late,), 300, 1)
    start = build.backward()
    one = build.grad((start, wide), 10, 1)
    build.grad((one, big), 10, 1)
    step = build.step()
    planner = Planner(step)
    budget = least_peak(step) + 20
    assert 0 < planner.bounds.seconds(budget) <= least_seconds(step, budget) + 1e-9
    solution = planner.solve(budget_bytes=budget)
    assert solution.recompute_seconds == least_seconds(step, budget)


def test_a_kept_form_is_not_enough_for_who_reads_the_value_itself():
    """As with a ReLU before a layer: one gradient needs its sign alone, the other its value."""
    build = StepBuilder()
    big, sign = build.signed(build.given(8), 400, 100)
    late = build.op("late", (big,), 10, 1)
    wide = build.op("wide", (late,), 300, 1)
    start = build.backward()
    one = build.grad((start, wide), 10, 1)
    build.grad((build.grad((one, big), 10, 1), sign), 10, 1)
    step = build.step()
    bounds = Bounds(Table(step))
    budget = least_peak(step)
    best = least_seconds(step, budget)
    assert best / 2 < bounds.seconds(budget) <= best  # a kept form takes a quarter


def test_a_kept_form_is_not_enough_for_what_is_made_of_the_value_again():
    """As with a ReLU before a dropout: what is kept for the one's gradient does not bring the other back."""
    build = StepBuilder()
    big, sign = build.signed(build.given(8), 400, 100)
    out = build.op("out", (big,), 400, 5)
    wide = build.op("wide", (build.op("narrow", (out,), 10, 1),), 700, 1)
    start = build.backward()
    one = build.grad((start, wide), 10, 1)
    build.grad((build.grad((one, out), 10, 1), sign), 10, 1)
    step = build.step()
    bounds = Bounds(Table(step))
    budget = least_peak(step) + 20
    best = least_seconds(step, budget)
    assert best == 105  # both ops
    assert 0.7 * best < bounds.seconds(budget) <= best  # with what is kept it would be less than a third


def test_a_bound_counts_the_views_through_which_a_value_is_read_again():
    build = StepBuilder()
    first = build.op("a", (build.given(8),), 400, 10)
    second = build.op("b", (build.view(build.view(first, 3), 4),), 400, 10)
    third = build.op("c", (second,), 400, 10)
    wide = build.op("wide", (third,), 400, 1)
    start = build.backward()
    one = build.grad((start, wide), 10, 1)
    build.grad((one, second), 10, 1)
    step = build.step()
    budget = least_peak(step)
    best = least_seconds(step, budget)
    assert best == 27  # both ops and both views
    assert 0.95 * best < Bounds(Table(step)).seconds(budget) <= best


def test_the_fullest_cut_leaves_no_room_for_another_of_several_equal_layers():
    """Their price is one, so that a cut for any price holds all of them or none."""
    build = StepBuilder()
    source = build.given(8)
    layers = [build.op("layer", (source,), 40, 10) for _ in range(6)]
    wide = build.op("wide", (source,), 500, 1)
    gradient = build.grad((build.backward(), wide), 10, 1)
    for layer in layers:
        gradient = build.grad((gradient, layer), 10, 1)
    bounds = Bounds(Table(build.step()))
    at = bounds.at(wide)
    budget = at.at.fixed_bytes + 130
    assert {cut.nbytes for cut in at.cuts} <= {0, 240}
    cut = at.fullest(budget)
    assert (cut.nbytes, cut.seconds, len(cut.kept)) == (120, 30, 3)
    assert at.best_seconds(budget) == pytest.approx(60 - 130 / 4)


@pytest.mark.parametrize(
    "step",
    [
        unet(depth=3, side=32),
        transformer(layers=3, width=64, heads=2, batch=2, length=32),
        chain(length=40),
    ],
    ids=["unet", "transformer", "chain"],
)
def test_plans_of_models_are_near_their_bounds(step):
    planner = Planner(step)
    high, low = planner.baseline.peak_bytes, planner.bounds.floor_bytes
    last = -1.0
    for part in (1, 2, 3):
        solution = planner.solve(budget_bytes=high - (high - low) * part // 8)
        assert last <= solution.lower_bound_seconds <= solution.recompute_seconds
        assert solution.recompute_seconds <= 1.35 * solution.lower_bound_seconds
        last = solution.lower_bound_seconds


def test_without_recompute_a_plan_is_optimal():
    solution = Planner(chain(length=8)).solve(budget_bytes=10**9)
    assert (solution.lower_bound_seconds, solution.gap) == (0.0, 0.0)


def test_a_floor_is_proven_where_plan_and_bound_meet():
    build = StepBuilder()
    source = build.given(8)
    first = build.op("a", (source,), 40, 1)
    second = build.op("b", (first,), 40, 1)
    start = build.backward()
    one = build.grad((start, second), 10, 1)
    build.grad((one, first), 10, 1)
    solution = Planner(build.step()).solve(budget_bytes=10**6)
    assert solution.floor_bytes == solution.floor_bound_bytes and solution.is_floor_proven


@settings(max_examples=50, deadline=None)
@given(steps(max_forward=6))
def test_no_sequence_of_any_step_is_below_its_bound(step):
    planner = Planner(step)
    low, high = planner.bounds.floor_bytes, planner.baseline.peak_bytes
    for part in range(4):
        search = planner.problem.search_problem
        figures, _ = search.problem.anneal(
            search.sequence(()), budget_bytes=low + (high - low) * part // 4, moves=1000, warmth=1.0
        )
        assert figures.peak_bytes >= low
        assert planner.bounds.seconds(figures.peak_bytes) <= figures.seconds + 1e-9
