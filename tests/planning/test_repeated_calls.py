"""Facts of a step with several calls, from those of one call."""

from dataclasses import replace
from itertools import pairwise

from synthetic import chain

from lowtide.facts import EARLIER, Kind, Node, Region, Storage
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


def test_gradients_of_earlier_microbatches_are_there_once() -> None:
    step = chain(length=4)
    made = len(step.storages)
    earlier = Storage(id=made, nbytes=1000, kind=Kind.GRADIENT, name=EARLIER, pinned=True)
    last = step.nodes[-1]
    first = Node(
        rank=0,
        name=EARLIER,
        op="placeholder",
        region=Region.FORWARD,
        kind=Kind.GRADIENT,
        holds=(made,),
        makes=(made,),
    )
    nodes = [first]
    for node in step.nodes:
        reads = tuple(read + 1 for read in node.reads) + ((0,) if node is last else ())
        remats = tuple(replace(r, reads=tuple(read + 1 for read in r.reads)) for r in node.remats)
        nodes.append(replace(node, rank=node.rank + 1, reads=reads, remats=remats))
    begun = replace(step, nodes=tuple(nodes), storages=(*step.storages, earlier))
    whole = step_of_calls(begun, 3)
    assert whole.calls == 3
    assert sum(storage.name == EARLIER for storage in whole.storages) == 1
    assert [bool(node.makes) for node in whole.nodes if node.name == EARLIER] == [True, False, False]
    without = Planner(step_of_calls(step, 3)).baseline.peak_bytes
    assert Planner(whole).baseline.peak_bytes <= without + 1000
