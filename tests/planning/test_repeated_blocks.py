"""Equal blocks: found by what they do, solved in a shorter step, and spread over all."""

from dataclasses import replace

import pytest
from synthetic import Net, transformer

from lowtide.facts import Kind
from lowtide.planning import auto
from lowtide.planning.auto import Auto, spread_of
from lowtide.planning.planner import Planner
from lowtide.planning.repeated_blocks import TILE, find_repeats, representative
from lowtide.planning.search.problem import Problem
from lowtide.planning.simulate import baseline_runs, simulate

SHARES = (0.8, 0.4)


def layers(count, *, odd=-1):
    """Equal layers in a row; number `odd` takes a little longer."""
    net = Net()
    x = net.sized(net.build.given(4000, Kind.INPUT), 4000)
    for layer in range(count):
        y = net.linear(x, 16000, 64, 1e6 if layer != odd else 1.1e6)
        y = net.linear(net.pointwise("gelu", y, saves="in"), 4000, 64, 1e6)
        x = net.norm(net.add(x, y), stats=False)
    return net.finish(x)


def renamed(step):
    """The same without a name."""
    nodes = tuple(replace(node, name=f"n{node.rank}", module="", source="") for node in step.nodes)
    return replace(step, nodes=nodes, storages=tuple(replace(s, name="") for s in step.storages))


def seconds_at(planner, share):
    static, peak = planner.table.static_bytes, planner.baseline.peak_bytes
    solution = planner.solve(budget_bytes=static + int((peak - static) * share))
    timeline = simulate(planner.step, solution.schedule.runs)
    assert timeline.peak_bytes == solution.peak_bytes <= solution.budget_bytes
    assert timeline.added_seconds == solution.recompute_seconds
    return solution.recompute_seconds


def test_equal_layers_are_found_by_what_they_do():
    step = transformer(layers=9, width=64, heads=2, batch=2, length=32)
    (found,) = find_repeats(step)
    assert found.forward.count >= 8
    assert found.backward.count >= 8
    # a layer is as many ops as one more layer adds
    more = transformer(layers=10, width=64, heads=2, batch=2, length=32)
    assert found.forward.length == more.first_backward_rank - step.first_backward_rank
    assert found.forward.length + found.backward.length == len(more.nodes) - len(step.nodes)
    assert find_repeats(renamed(step)) == [found]


def test_a_layer_that_differs_a_little_is_in_no_row():
    step, odd = layers(30), layers(30, odd=12)
    changed = [n.rank for n, other in zip(step.nodes, odd.nodes, strict=True) if n.seconds != other.seconds]
    assert len(find_repeats(step)) == 1
    rows = [stretch for repeat in find_repeats(odd) for stretch in (repeat.forward, repeat.backward)]
    assert len(rows) == 4
    assert not any(rank in row for rank in changed for row in rows)


def test_a_shorter_step_is_the_same_for_any_number_of_layers():
    short, same = (representative(layers(60 + more)) for more in (0, TILE))
    assert renamed(short.step) == renamed(same.step)
    assert short.most_blocks + TILE == same.most_blocks
    plain = simulate(short.step, baseline_runs(short.step))
    assert plain.peak_bytes < simulate(layers(60), baseline_runs(layers(60))).peak_bytes
    # it is a part of the whole: as many layers fewer, all else as it was
    fewer = layers(60 - short.most_blocks)
    assert len(short.step.nodes) == len(fewer.nodes)
    assert plain.peak_bytes == simulate(fewer, baseline_runs(fewer)).peak_bytes
    assert plain.seconds == pytest.approx(simulate(fewer, baseline_runs(fewer)).seconds)


def test_a_few_equal_layers_have_no_shorter_step():
    assert representative(layers(8)) is None


def test_the_search_does_not_grow_with_the_number_of_equal_layers(monkeypatch):
    anneal = Problem.anneal
    tried: list[int] = []

    def counted(self, order, *, moves, **options):
        tried.append(moves)
        return anneal(self, order, moves=moves, **options)

    def moves_for(count):
        tried.clear()
        Planner(layers(count)).problem.once(Auto)
        return sum(tried)

    monkeypatch.setattr(Problem, "anneal", counted)
    assert moves_for(60 + 10 * TILE) <= 1.05 * moves_for(60)


@pytest.mark.parametrize("odd", (pytest.param(-1, marks=pytest.mark.long), 1))
def test_plans_are_as_good_as_of_a_search_among_all_layers(monkeypatch, odd):
    """Also where one layer is nearly equal: its row ends there."""
    step = layers(72, odd=odd)
    planner = Planner(step)
    assert spread_of(planner.problem) is not None
    found = [seconds_at(planner, share) for share in SHARES]
    assert found == sorted(found)
    monkeypatch.setattr(auto, "representative", lambda step: None)
    alone = Planner(step)
    assert sum(found) <= 1.01 * sum(seconds_at(alone, share) for share in SHARES)


def test_what_a_spread_plan_holds_is_what_the_simulator_says():
    planner = Planner(layers(60))
    spread = spread_of(planner.problem)
    assert len(spread.points) > 5
    for point in spread.points:
        timeline = planner.problem.search_problem.timeline(point.order)
        assert timeline.peak_bytes == point.peak_bytes
        assert timeline.added_seconds == pytest.approx(point.seconds)
