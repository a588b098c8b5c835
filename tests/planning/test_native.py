"""The compiled search counts as the simulator does, and its cuts are minimal."""

import shutil
from itertools import product
from random import Random

import numpy as np
import pytest
from exact import least_peak, random_step
from hypothesis import given, settings
from strategies import StepBuilder, steps

from lowtide.errors import LowtideError
from lowtide.planning.native import SOURCE, library, library_name
from lowtide.planning.planner import Planner
from lowtide.planning.schedules import without_needless_runs
from lowtide.planning.simulate import simulate


@settings(max_examples=40, deadline=None)
@given(steps(max_forward=10))
def test_a_sequence_holds_and_adds_what_the_simulator_says(step):
    check_counts(step)


def test_a_value_that_comes_back_for_some_readers_only_is_counted_as_the_simulator_does():
    for seed in range(30):
        check_counts(random_step(Random(seed), signs=True))


def check_counts(step):
    planner = Planner(step)
    problem = planner.problem.search_problem.problem
    plain = planner.problem.search_problem.sequence(())
    assert problem.evaluate(plain, 0).peak_bytes == planner.baseline.peak_bytes
    budget = planner.bounds.floor_bytes + (planner.baseline.peak_bytes - planner.bounds.floor_bytes) // 2
    figures, order = problem.anneal(plain, budget_bytes=budget, moves=300, warmth=1.0)
    timeline = simulate(step, without_needless_runs(step, planner.problem.search_problem.runs(order)))
    assert timeline.peak_bytes == figures.peak_bytes
    assert timeline.added_seconds == planner.problem.search_problem.added_seconds(order)
    assert timeline.added_seconds == pytest.approx(figures.seconds)
    again = problem.evaluate(order, budget)
    assert (again.excess_bytes, again.peak_bytes) == (figures.excess_bytes, figures.peak_bytes)
    assert (figures.excess_bytes == 0) == (figures.peak_bytes <= budget)


def test_a_value_stays_until_the_last_view_of_the_forward_pass_is_taken():
    """A view that nothing of the forward pass reads: its value cannot be brought back before it."""
    build = StepBuilder()
    source = build.given(2)
    first = build.op("a", (source,), 21, 1)
    wide = build.op("wide", (source,), 25, 1)
    view = build.view(first)
    gradient = build.grad((build.backward(), wide), 1, 1)
    build.grad((gradient, view), 1, 1)
    step = build.step()
    planner = Planner(step)
    figures, order = planner.problem.search_problem.problem.anneal(
        planner.problem.search_problem.sequence(()), budget_bytes=30, moves=2000, warmth=1.0
    )
    assert figures.peak_bytes == planner.problem.search_problem.timeline(order).peak_bytes == least_peak(step)
    assert planner.floor_bytes == least_peak(step)


def test_the_same_seed_gives_the_same_sequence():
    planner = Planner(random_step(Random(7)))
    found = [
        planner.problem.search_problem.problem.anneal(
            planner.problem.search_problem.sequence(()),
            budget_bytes=planner.bounds.floor_bytes,
            moves=500,
            warmth=1.0,
            seed=3,
        )[1].tolist()
        for _ in range(2)
    ]
    assert found[0] == found[1]


def brute_force(size, tails, heads, capacities):
    """The cheapest set of vertices with the source and without the sink."""
    best = None
    for rest in product((False, True), repeat=size - 2):
        side = (True, False, *rest)
        value = sum(c for t, h, c in zip(tails, heads, capacities, strict=True) if side[t] and not side[h])
        best = value if best is None else min(best, value)
    return best


def test_cuts_are_minimal():
    random = Random(0)
    for _ in range(60):
        size, count = random.randint(2, 7), random.randint(1, 14)
        pairs = [(random.randrange(size), random.randrange(size)) for _ in range(count)]
        tails, heads = (np.array(side, dtype=np.int32) for side in zip(*pairs, strict=True))
        capacities = np.array([random.randint(0, 9) for _ in pairs], dtype=np.int64)
        flow, reached = library.min_cut(size, tails, heads, capacities)
        assert flow == brute_force(size, tails, heads, capacities)
        assert reached[0] and not reached[1]
        assert flow == sum(
            c for t, h, c in zip(tails, heads, capacities, strict=True) if reached[t] and not reached[h]
        )


def test_without_a_compiler_planning_is_refused_in_one_line(monkeypatch, tmp_path):
    source = tmp_path / "native.c"
    for path in SOURCE.parent.glob("*.[ch]"):
        shutil.copy(path, tmp_path)
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(
        LowtideError, match=r"cannot be built .*no-such-compiler.*: install a C compiler"
    ) as caught:
        library.find_or_build(source)
    assert "\n" not in str(caught.value)
    monkeypatch.delenv("CC")
    assert library.find_or_build(source) == tmp_path / library_name()
    for path in (source, tmp_path / "state.h"):
        before = library_name(source)
        path.write_text(path.read_text() + "\n")
        assert library_name(source) != before, path.name


def test_no_folder_to_build_in_is_told_apart_from_no_compiler(monkeypatch, tmp_path):
    (tmp_path / "native.c").touch()
    (tmp_path / "file").touch()
    monkeypatch.setattr(library.os, "access", lambda *_: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(LowtideError, match=r"to build it in cannot be written .*: set XDG_CACHE_HOME"):
        library.find_or_build(tmp_path / "native.c")
