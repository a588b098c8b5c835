"""Transfers on the clock, against examples worked out by hand."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import StepBuilder, orders, release_places, steps

from lowtide.facts import Graph, Run, TransferSpeed
from lowtide.planning.schedules import graph_schedules, runs_of_schedules
from lowtide.planning.simulate import simulate
from lowtide.planning.transfer_model import (
    last_forward_reads,
    released_after,
    simulate_transfers,
    with_releases,
)

LINK = TransferSpeed(store="disk:/x", write_bytes_per_second=10, read_bytes_per_second=20, latency_seconds=1)


def offload_chain(link=LINK):
    """Ranks: weight 0, a 1 (leave 2), b 3 (leave 4), c 5; backward 6, of c 7, of b 8, of a 9."""
    build = StepBuilder(link=link)
    weight = build.given(100)
    a = build.offloadable(build.op("a", (weight,), 40, 2.0))
    b = build.offloadable(build.op("b", (a,), 20, 1.0))
    c = build.op("c", (b,), 10, 8.0)
    start = build.backward()
    first = build.grad((start, c), 5, 3.0)
    second = build.grad((first, b), 5, 3.0)
    build.grad((second, a), 5, 3.0)
    return build.step()


def moves(traffic):
    return [(t.node, t.is_write, t.begin_seconds, t.end_seconds, t.stall_seconds) for t in traffic.transfers]


def test_transfers_hide_behind_compute_one_at_a_time():
    step = offload_chain()
    # a is let go at the end of the forward pass, b right after it, and both come back one node early
    order = [Run(r) for r in (0, 1, 3, 5, 2, 4, 6)]
    order += [Run(3, "swap"), Run(7), Run(1, "swap"), Run(8), Run(9)]
    traffic = simulate_transfers(step, order, LINK)
    # a: 1 + 40/10 s from second 2 to 7; b, made at 3, waits for the link: 1 + 20/10 s from 7 to 10;
    # the forward pass computes until 11. Back: b 1 + 20/20 s, a 1 + 40/20 s, each behind 3 s of compute.
    assert moves(traffic) == [
        (1, True, 2, 7, 0),
        (3, True, 7, 10, 0),
        (3, False, 11, 13, 0),
        (1, False, 14, 17, 0),
    ]
    assert traffic.run_seconds == (0, 0, 2, 3, 11, 11, 11, 11, 11, 14, 14, 17)
    assert (traffic.transfer_seconds, traffic.stall_seconds, traffic.hidden_seconds) == (13, 0, 13)
    assert traffic.store_bytes == 60
    assert traffic.pinned_bytes == 64 + 32, "torch rounds blocks of pinned memory to powers of two"


def test_what_does_not_hide_is_time_added():
    step = offload_chain()
    # both are let go right after their last use, and come back where they are read
    order = [Run(r) for r in (0, 1, 3, 2, 5, 4, 6, 7)]
    order += [Run(3, "swap"), Run(8), Run(1, "swap"), Run(9)]
    timeline = simulate(step, order)
    assert timeline.traffic is not None
    assert moves(timeline.traffic) == [
        (1, True, 2, 7, 4),  # needed at 3
        (3, True, 7, 10, 0),  # the clock is at 15
        (3, False, 18, 20, 2),
        (1, False, 23, 26, 3),
    ]
    assert timeline.added_seconds == timeline.stall_seconds == 9
    assert timeline.seconds == step.seconds + 9
    # 100 static; a leaves with run 3, b with run 5, and they come back with runs 8 and 10
    assert timeline.live_bytes.tolist() == [100, 140, 160, 161, 131, 132, 116, 121, 127, 131, 146, 150]


def test_compute_beside_transfers_is_slower_by_what_copies_take():
    step = offload_chain()
    order = [Run(r) for r in (0, 1, 3, 2, 5, 6, 7, 8)]
    order += [Run(1, "swap"), Run(9)]
    plain = simulate_transfers(step, order, LINK)
    slowed = simulate_transfers(step, order, replace(LINK, slows_compute=0.25))
    assert slowed.stall_seconds == plain.stall_seconds and plain.slowed_seconds == 0
    assert slowed.slowed_seconds == 0.25 * plain.hidden_seconds > 0
    timeline = simulate(replace(step, transfer_speed=replace(LINK, slows_compute=0.25)), order)
    assert timeline.added_seconds == slowed.stall_seconds + slowed.slowed_seconds


def test_a_value_that_is_read_back_twice_takes_the_link_twice():
    step = offload_chain()
    order = [Run(r) for r in (0, 1, 3, 2, 5, 6)]
    order += [Run(1, "swap"), Run(7), Run(8), Run(1, "swap"), Run(9)]
    traffic = simulate_transfers(step, order, LINK)
    assert [(t.is_write, t.awaited_at) for t in traffic.transfers] == [(True, 3), (False, -1), (False, 10)]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ((0, 2, 1, 3, 5, 6, 7, 8, 9), "reads 'a_1', which has not run"),
        ((0, 1, 3, 5, 6, 2, 7, 8, 9), "'leave_2' runs outside the forward part of its segment 0"),
        ((0, 1, 2, 3, 2, 5, 6, 7, 8, 9), "'leave_2' runs twice"),
    ],
)
def test_a_release_out_of_place_is_refused(order, message):
    with pytest.raises(ValueError, match=message):
        simulate(offload_chain(), [Run(rank) for rank in order])


def test_a_release_before_its_rank_is_refused():
    build = StepBuilder(link=LINK)
    weight = build.given(1)
    a = build.op("a", (weight,), 1, 1.0)
    b = build.op("b", (a,), 1, 1.0)
    build.node("leave", (a,), makes=(build.storage(1),), on_demand=True, movable=True)
    build.backward()
    with pytest.raises(ValueError, match="'leave_3' runs before its rank 3"):
        simulate(build.step(), [Run(rank) for rank in (weight, a, 3, b, 4)])


def test_a_value_is_let_go_after_the_last_use_of_what_it_holds():
    build = StepBuilder(link=LINK)
    weight = build.given(1)
    a = build.offloadable(build.op("a", (weight,), 1, 1.0))
    view = build.view(a)
    build.op("b", (a,), 1, 1.0)
    last = build.op("c", (view,), 1, 1.0)
    build.op("d", (weight,), 1, 1.0)
    build.backward()
    assert last_forward_reads(build.step()) == {a + 1: last}


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_schedules_of_graphs_say_where_values_are_let_go(data):
    step = data.draw(steps(offload=True))
    graph = Graph(fingerprint="", in_model=True, returned=(), missing=())
    num_graphs = 1 + max(node.segment for node in step.nodes)
    step = type(step)(**{**{f: getattr(step, f) for f in step.__slots__}, "graphs": (graph,) * num_graphs})
    order = data.draw(orders(step))
    places = {leave: data.draw(release_places(step, leave)) for leave in released_after(step, order)}
    order = with_releases(step, order, places)
    graphs = graph_schedules(step, order)
    back = runs_of_schedules(step, [g.schedule for g in graphs], [g.releases for g in graphs])
    assert released_after(step, back) == released_after(step, order)
    assert simulate(step, back).live_bytes.tolist() == simulate(step, order).live_bytes.tolist()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_stalls_are_the_only_seconds_that_transfers_add(data):
    step = data.draw(steps(offload=True))
    order = data.draw(orders(step))
    traffic = simulate(step, order).traffic
    assert traffic is not None
    for is_write in (True, False):
        mine = [t for t in traffic.transfers if t.is_write is is_write]
        assert all(a.end_seconds <= b.begin_seconds for a, b in pairwise(mine))
    for transfer in traffic.transfers:
        if transfer.awaited_at >= 0:
            assert traffic.run_seconds[transfer.awaited_at] >= transfer.end_seconds
    end = traffic.run_seconds[-1] + step.nodes[order[-1].rank].seconds
    assert end == pytest.approx(simulate(step, order).seconds)
