"""Facts of a step with several calls, from those of one call."""

from itertools import pairwise

from synthetic import chain

from lowtide.facts import Kind, Region
from lowtide.planning.planner import Planner
from lowtide.planning.repeated_calls import step_of_calls
from lowtide.planning.simulate import simulate


def test_one_call_is_the_step_itself() -> None:
    step = chain(length=4)
    assert step_of_calls(step, 1) is step


def test_calls_run_forward_in_their_order_and_backward_in_reverse() -> None:
    step = chain(length=4)
    whole = step_of_calls(step, 3)
    assert [node.rank for node in whole.nodes] == list(range(len(whole.nodes)))
    assert [storage.id for storage in whole.storages] == list(range(len(whole.storages)))
    assert all(read < node.rank for node in whole.nodes for read in node.reads)
    regions = [node.region for node in whole.nodes]
    order = list(Region)
    assert all(order.index(one) <= order.index(next_one) for one, next_one in pairwise(regions))
    backward = [node.name for node in whole.nodes if node.region is Region.BACKWARD]
    assert backward == [node.name for node in step.nodes if node.region is Region.BACKWARD] * 3


def test_what_an_earlier_call_saves_is_live_while_a_later_one_runs() -> None:
    step = chain(length=6)
    static = sum(s.nbytes for s in step.storages if s.static)
    one = Planner(step).baseline.peak_bytes - static
    runs = Planner(step_of_calls(step, 2)).baseline
    assert one < runs.peak_bytes - static <= 2 * one + static
    assert simulate(step_of_calls(step, 2), runs.runs).peak_bytes == runs.peak_bytes


def test_parameters_are_there_once_and_gradients_stay_once() -> None:
    step = chain(length=4)
    whole = step_of_calls(step, 3)
    for kind in (Kind.PARAMETER, Kind.OPTIMIZER_STATE):
        count = sum(storage.kind is kind and storage.static for storage in step.storages)
        assert sum(storage.kind is kind and storage.static for storage in whole.storages) == count
    pinned = sum(storage.kind is Kind.GRADIENT and storage.pinned for storage in step.storages)
    assert sum(storage.kind is Kind.GRADIENT and storage.pinned for storage in whole.storages) == pinned
