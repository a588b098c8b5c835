"""The form of a step whose weights rest: what is live when, and where fetches may run."""

from dataclasses import replace

import pytest
from strategies import StepBuilder

from lowtide.facts import FETCH, Kind, Region, Run, Step, TransferSpeed
from lowtide.planning.planner import Planner
from lowtide.planning.resting_weights import restable_weights, with_resting_weights
from lowtide.planning.simulate import baseline_runs, simulate
from lowtide.planning.variants import variants

SPEED = TransferSpeed(store="disk:/x", write_bytes_per_second=100.0, read_bytes_per_second=100.0)
WEIGHT, VALUE = 100, 8


def chain(*, layers: int = 3, tied: bool = False, seconds: float = 1.0) -> Step:
    """Each layer reads a weight, forward by a view and backward; the first and the last may share theirs."""
    builder = StepBuilder()
    weights = [builder.given(WEIGHT) for _ in range(layers - tied)]
    weights += weights[:1] if tied else []
    value = builder.given(VALUE, Kind.INPUT)
    values, views = [value], []
    for weight in weights:
        views.append(builder.view(weight))
        values.append(builder.op("mm", (values[-1], views[-1]), VALUE, seconds))
    builder.node("output", (values[-1],))
    builder.region = Region.BACKWARD
    gradient = builder.node("placeholder", makes=(builder.storage(VALUE),))
    for number in reversed(range(layers)):
        gradient = builder.op("mm_backward", (gradient, views[number], values[number]), VALUE, seconds)
    builder.node("output", (gradient,))
    storages = tuple(
        replace(s, rests="parameters") if s.kind is Kind.PARAMETER else s for s in builder.storages
    )
    return Step(nodes=tuple(builder.nodes), storages=storages, transfer_speed=SPEED)


def form_of(step: Step) -> Step:
    return with_resting_weights(step, restable_weights(step))


def lowest(step: Step):
    return Planner(step, variants(step)).lowest()


def test_one_weight_is_live_at_a_time_at_the_floor():
    step = chain()
    form = form_of(step)
    assert [node.name for node in form.nodes if node.op == FETCH] == [f"fetch of s{n}" for n in range(3)]
    plain, resting = lowest(step), lowest(form)
    assert plain.peak_bytes - resting.peak_bytes == 2 * WEIGHT
    assert {form.nodes[run.rank].name for run in resting.runs if run.rule == "rest"} >= {
        "fetch of s0",
        "fetch of s1",
    }


def test_without_names_and_twice_the_step_is_the_same():
    step = chain()
    assert with_resting_weights(step, ()) is step
    assert with_resting_weights(step, ("state:s0", "frozen:other")) is step
    form = form_of(step)
    assert with_resting_weights(form, restable_weights(step)) is form
    # a weight that was frozen when the plan was made
    assert with_resting_weights(step, ("frozen:s0", "frozen:s1", "frozen:s2")) == form


def test_distant_uses_of_a_tied_weight_are_read_twice():
    form = form_of(chain(layers=4, tied=True))
    fetches = [node for node in form.nodes if node.op == FETCH]
    assert [node.name for node in fetches] == ["fetch of s0", "fetch of s1", "fetch of s2", "fetch of s0 2"]
    assert len({node.makes for node in fetches}) == 4
    # a store so slow that a second read takes longer than the ops in between and the other weights
    near = chain(layers=3, tied=True)
    near = replace(
        near,
        transfer_speed=replace(SPEED, latency_seconds=0.0),
        storages=tuple(replace(s, nbytes=1) if s.name == "s1" else s for s in near.storages),
    )
    slow = replace(near, transfer_speed=replace(SPEED, read_bytes_per_second=1.0))
    assert [node.name for node in form_of(slow).nodes if node.op == FETCH] == ["fetch of s0", "fetch of s1"]


def test_the_first_fetch_waits_and_later_ones_hide_as_far_as_the_budget_allows():
    form = form_of(chain(seconds=2.0))
    planner = Planner(form, variants(form))
    stalls = []
    for spare in (0, WEIGHT, 3 * WEIGHT):
        timeline = planner.best(planner.floor_bytes + spare)
        assert timeline.peak_bytes <= planner.floor_bytes + spare
        stalls.append(timeline.traffic.stall_seconds)
    assert stalls == sorted(stalls, reverse=True) and stalls[0] > stalls[-1] == pytest.approx(1.0)
    waits = [t.stall_seconds for t in timeline.traffic.transfers]
    assert waits[0] == pytest.approx(1.0) and max(waits[1:]) == 0  # nothing runs before the first weight


def test_a_fetch_runs_once_and_not_after_its_rank():
    form = form_of(chain())
    runs = list(baseline_runs(form))
    (first, second, _) = [node.rank for node in form.nodes if node.op == FETCH]
    moved = [run for run in runs if run.rank != second]
    moved.insert(moved.index(Run(first)), Run(second))
    early = simulate(form, moved)
    assert early.live_bytes[moved.index(Run(first))] == 2 * WEIGHT + VALUE
    for wrong, words in (
        ([*moved[: moved.index(Run(first))], Run(second), *moved[moved.index(Run(first)) :]], "twice"),
        ([Run(second), *(run for run in moved if run.rank != second)], "has not run"),
        ([*(run for run in runs if run.rank != second)], "has not run"),
    ):
        with pytest.raises(ValueError, match=words):
            simulate(form, wrong)
