"""What every planner promises, on random steps and on steps shaped like real models."""

import dataclasses
import sys
from random import Random

import pytest
from exact import random_step
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import StepBuilder, steps
from synthetic import chain, resnet, transformer, unet

from lowtide.errors import BudgetTooSmall, LowtideError
from lowtide.facts import Action, Kind, Region
from lowtide.planning import variants
from lowtide.planning.auto import Auto
from lowtide.planning.lower_bounds import Bounds
from lowtide.planning.planner import Planner
from lowtide.planning.registry import BUILT_IN
from lowtide.planning.search.problem import Problem
from lowtide.planning.simulate import baseline_runs, simulate

SHAPES = {
    "resnet": lambda: resnet(blocks=(2, 2, 2, 1)),
    "transformer": lambda: transformer(layers=3, width=64, heads=2, batch=2, length=32),
    "unet": lambda: unet(depth=3, side=32),
    "chain": lambda: chain(length=40),
}


@pytest.fixture(scope="module", params=SHAPES)
def shaped(request):
    return Planner(SHAPES[request.param]())


def attempt(planner, budget_bytes, name):
    try:
        return planner.solve(budget_bytes=budget_bytes, planner=name)
    except BudgetTooSmall as error:
        assert error.floor_bytes > budget_bytes
        return error


def check(step, solution):
    """The figures of a solution are those of the simulator."""
    timeline = simulate(step, solution.schedule.runs)
    plain = simulate(step, baseline_runs(step))
    assert solution.peak_bytes == timeline.peak_bytes <= solution.budget_bytes
    assert solution.recompute_seconds == timeline.added_seconds
    assert solution.peak_node == timeline.peak_node
    assert solution.baseline_peak_bytes == plain.peak_bytes
    assert sum(d.seconds for d in solution.decisions) == pytest.approx(solution.recompute_seconds)
    assert all(d.reason for d in solution.decisions)
    assert all((d.times > 0) == bool(d.method) for d in solution.decisions)


@pytest.mark.parametrize("wrong_bytes", (8, 1 << 20))
def test_the_lowest_peak_is_one_that_the_simulator_confirms(monkeypatch, wrong_bytes):
    """A search that counts too few bytes is corrected, entry by entry, down to the floor."""
    simulated = Auto.timeline

    def corrected(self, entry):
        timeline = simulated(self, entry)
        return dataclasses.replace(timeline, peak_bytes=timeline.peak_bytes + wrong_bytes)

    monkeypatch.setattr(Auto, "timeline", corrected)
    search = Planner(chain(length=12)).problem.once(Auto)
    found = search.best_timeline(search.floor_bytes)
    assert found is not None
    assert found.peak_bytes == search.floor_bytes


@pytest.mark.parametrize("share", (0.6, 0.8))
def test_what_the_simulator_says_counts_where_the_search_counts_less(monkeypatch, share):
    """A search that forgets a part of the bytes never gives a plan above the budget."""
    evaluate, anneal = Problem.evaluate, Problem.anneal

    def less(figures):
        return dataclasses.replace(figures, peak_bytes=figures.peak_bytes * 9 // 10)

    monkeypatch.setattr(Problem, "evaluate", lambda *args: less(evaluate(*args)))
    monkeypatch.setattr(
        Problem, "anneal", lambda *args, **kw: (less((found := anneal(*args, **kw))[0]), found[1])
    )
    step = chain(length=12)
    planner = Planner(step)
    found = attempt(planner, int(planner.baseline.peak_bytes * share), "auto")
    if not isinstance(found, BudgetTooSmall):
        check(step, found)
    assert planner.solve(budget_bytes=planner.floor_bytes).peak_bytes <= planner.floor_bytes


@settings(max_examples=25, deadline=None)
@given(steps(max_forward=10), st.floats(0.3, 1.0))
def test_auto_is_never_worse_than_another_planner(step, share):
    budget = max(1, int(simulate(step, baseline_runs(step)).peak_bytes * share))
    planner = Planner(step)
    mine = attempt(planner, budget, "auto")
    for name in BUILT_IN:
        other = attempt(planner, budget, name)
        if isinstance(other, BudgetTooSmall):
            assert mine.floor_bytes <= other.floor_bytes
        else:
            check(step, other)
            assert mine.recompute_seconds <= other.recompute_seconds
    if not isinstance(mine, BudgetTooSmall):
        check(step, mine)


@settings(max_examples=25, deadline=None)
@given(steps(max_forward=10), st.lists(st.floats(0.0, 1.1), min_size=2, max_size=4))
def test_a_larger_budget_is_never_slower_and_the_floor_is_reachable(step, shares):
    planner = Planner(step)
    low = planner.floor().floor_bytes
    high = simulate(step, baseline_runs(step)).peak_bytes
    budgets = sorted(low + int((high - low) * share) for share in (0.0, *shares))
    for name in ("auto", "mu-two"):
        seconds = [
            s.recompute_seconds
            for s in (attempt(planner, b, name) for b in budgets)
            if not isinstance(s, BudgetTooSmall)
        ]
        assert seconds == sorted(seconds, reverse=True)
    assert planner.solve(budget_bytes=low).peak_bytes == low
    with pytest.raises(BudgetTooSmall) as caught:
        planner.solve(budget_bytes=low - 1)
    assert caught.value.floor_bytes == low
    assert planner.bounds.floor_bytes <= low


def test_shapes_of_real_models(shaped):
    fixed = shaped.table.static_bytes
    for share in (0.9, 0.7, 0.5):
        budget = fixed + int((shaped.baseline.peak_bytes - fixed) * share)
        found = {planner: attempt(shaped, budget, planner) for planner in BUILT_IN}
        for solution in found.values():
            if not isinstance(solution, BudgetTooSmall):
                check(shaped.step, solution)
                assert found["auto"].recompute_seconds <= solution.recompute_seconds


def test_the_curve_rises_from_the_plain_step_to_the_floor(shaped):
    curve = shaped.tradeoff(points=9)
    assert len(curve) == 9
    assert curve[0].recompute_seconds == 0
    assert curve[-1].peak_bytes == shaped.floor().floor_bytes
    seconds = [solution.recompute_seconds for solution in curve]
    assert seconds == sorted(seconds)


def test_a_chain_is_planned_far_below_the_square_root():
    planner = Planner(chain(length=64))
    assert planner.floor().floor_bytes <= 8 * 1000
    with pytest.raises(BudgetTooSmall, match="planner 'auto' meets this budget"):
        planner.solve(budget_bytes=8 * 1000, planner="sqrt")


def test_the_same_step_gives_the_same_solution():
    first, second = (Planner(SHAPES["unet"]()).solve(budget_bytes=9_000_000) for _ in range(2))
    assert Planner(SHAPES["unet"]()).floor_bytes == first.floor_bytes
    assert first.recompute_seconds > 0
    assert first == second


def test_an_unknown_planner_is_named_with_the_known_ones():
    with pytest.raises(LowtideError, match=r"no planner 'best': choose one of auto, mu-two, none, all"):
        Planner(chain(length=2)).solve(budget_bytes=10**9, planner="best")


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "auto"])
def test_only_auto_pays_for_its_search(name, monkeypatch):
    monkeypatch.setattr(variants, "Auto", lambda *_: pytest.fail("searched"))
    planner = Planner(chain(length=8))
    assert planner.solve(budget_bytes=10**9, planner=name).floor_bytes is None
    monkeypatch.undo()
    assert planner.solve(budget_bytes=10**9).floor_bytes == planner.floor().floor_bytes


def test_a_budget_above_the_plain_peak_recomputes_nothing():
    solution = Planner(chain(length=8)).solve(budget_bytes=10**9)
    assert solution.recompute_seconds == 0
    assert {d.reason for d in solution.decisions} == {"the budget is met without recomputing anything"}


def optimizer_step():
    build = StepBuilder()
    weight = build.given(100)
    first = build.op("a", (weight,), 10, 1.0)
    start = build.backward()
    build.grad((start, first), 100, 1.0, pinned=True)
    build.region = Region.OPTIMIZER
    build.node("adam", (weight,), makes=(build.storage(300, Kind.OTHER),))
    return build.step()


def test_an_optimizer_that_sets_the_floor_is_named_with_what_helps():
    with pytest.raises(
        BudgetTooSmall, match=r"optimizer step sets it.*fused=True or foreach=False"
    ) as caught:
        Planner(optimizer_step()).solve(budget_bytes=400)
    assert (caught.value.floor_bytes, caught.value.node) == (500, "adam_4")


def test_gradients_that_set_the_floor_are_named():
    build = StepBuilder()
    weight = build.given(100)
    first = build.op("a", (weight,), 10, 1.0)
    start = build.backward()
    build.grad((start, first), 100, 1.0, pinned=True)
    with pytest.raises(BudgetTooSmall, match="Parameters and gradients set it"):
        Planner(build.step()).solve(budget_bytes=100)


def test_retained_activations_say_why():
    build = StepBuilder()
    weight = build.given(1)
    written = build.fixed("write", (weight,), 50, 1.0)
    cheap = build.op("cheap", (weight,), 100, 1.0)
    dear = build.op("dear", (cheap, written), 100, 90.0)
    wide = build.op("wide", (dear,), 200, 1.0)
    late = build.op("late", (wide,), 5, 1.0)
    start = build.backward()
    one = build.grad((start, late), 5, 1.0)
    two = build.grad((one, dear), 5, 1.0)
    build.grad((two, cheap, written), 5, 1.0)
    step = build.step()
    peak = simulate(step, baseline_runs(step)).peak_bytes
    reasons = {d.name: (d.action, d.reason) for d in Planner(step).solve(budget_bytes=peak - 90).decisions}
    assert reasons["write_1"] == (Action.RETAINED, "cannot be recomputed: it has side effects")
    assert reasons["cheap_2"][0] is Action.RECOMPUTE
    assert "costs more per byte" in reasons["dear_3"][1]
    assert reasons["late_5"] == (Action.RETAINED, "does not live across the peak")


@pytest.mark.parametrize(("most", "seed"), [(20, 5), (40, 24)])
def test_values_that_can_be_kept_as_less_do_not_raise_a_floor(most, seed):
    step = random_step(Random(seed), most=most, signs=True)
    kept = {node.rank for node in step.nodes if node.on_demand}
    fewer = [
        dataclasses.replace(
            node, remats=tuple(r for r in node.remats if not r.reads or not kept.issuperset(r.reads))
        )
        for node in step.nodes
    ]
    assert list(step.nodes) != fewer
    without = dataclasses.replace(step, nodes=tuple(fewer))
    assert Planner(step).floor_bytes <= Planner(without).floor_bytes


def test_a_bound_that_is_above_a_schedule_by_rounding_ends_no_plan(monkeypatch):
    planner = Planner(chain(length=12))
    before = planner.solve(budget_bytes=planner.floor_bytes)
    monkeypatch.setattr(Bounds, "seconds", lambda *_: before.recompute_seconds * (1 + 1e-6))
    after = planner.solve(budget_bytes=planner.floor_bytes)
    assert after.lower_bound_seconds == after.recompute_seconds == before.recompute_seconds


def resized(step, factor):
    """The same ops on a batch of another size."""
    storages = (
        s if s.static else dataclasses.replace(s, nbytes=int(factor * s.nbytes)) for s in step.storages
    )
    return dataclasses.replace(step, storages=tuple(storages))


@pytest.mark.sample(4)
@pytest.mark.parametrize("factor", (0.5, 0.9, 1.1, 1.15))
def test_a_schedule_is_repaired_for_another_batch_size(shaped, factor):
    budget = shaped.floor_bytes + (shaped.baseline.peak_bytes - shaped.floor_bytes) // 3
    runs = shaped.solve(budget_bytes=budget).schedule.runs
    other = Planner(resized(shaped.step, factor))
    found = other.problem.repaired(runs, budget_bytes=budget)
    assert found is not None and found.peak_bytes <= budget
    assert found.added_seconds <= 1.5 * other.solve(budget_bytes=budget).recompute_seconds
    assert other.problem.repaired(runs, budget_bytes=other.bounds.floor_bytes - 1) is None


def test_a_chain_of_views_may_be_longer_than_the_stack_of_python():
    build = StepBuilder()
    source = build.given(8)
    value = build.op("op", (source,), 100, 1)
    for _ in range(sys.getrecursionlimit() + 200):
        value = build.view(value)
    wide = build.op("wide", (value,), 50, 1)
    build.grad((build.grad((build.backward(), wide), 10, 1), value), 1, 1)
    planner = Planner(build.step())
    for name in ("auto", "mu-two", "sqrt"):
        planner.solve(budget_bytes=planner.baseline.peak_bytes, planner=name)
