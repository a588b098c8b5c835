"""The simulator against a naive reference, and what a schedule may not do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import StepBuilder, orders, steps

from lowtide.facts import Kind, Region
from lowtide.planning.simulate import plain_order, simulate


def reference(step, order):
    """Bytes held at every run, by asking for each block and each position: is anyone still to read it?"""
    last_run, runs = {}, []
    for position, rank in enumerate(order):
        node = step.nodes[rank]
        what = node if rank not in last_run else node.recipe
        runs.append((rank, what, {read: last_run[read] for read in what.reads}))
        last_run[rank] = position

    def block_of(position, storage):
        _, what, sources = runs[position]
        if storage in what.makes:
            return position, storage
        for read in what.reads:
            earlier = runs[sources[read]]
            if storage in earlier[1].holds:
                return block_of(sources[read], storage)
        raise AssertionError("holds what it cannot have")

    def reads(reader, position):
        """Whether the run `reader` needs all that `position` made: a part of a first value stands alone."""
        rank, what, sources = runs[reader]
        if position not in sources.values():
            return False
        again, makes_nothing = order.index(rank) != reader, not what.makes and len(what.reads) == 1
        of_first_value = order.index(runs[position][0]) == position
        is_part = set(what.holds) < set(step.nodes[runs[position][0]].holds)
        return not (again and makes_nothing and of_first_value and is_part)

    def read_until(position):
        return max([position] + [p for p in range(len(runs)) if reads(p, position)])

    blocks = {}
    for position, (rank, what, _) in enumerate(runs):
        for storage in (*what.holds, *what.makes):
            if not step.storages[storage].static:
                block = block_of(position, storage)
                blocks[block] = max(blocks.get(block, 0), read_until(position))
                if step.storages[storage].pinned and order.index(rank) == position == block[0]:
                    blocks[block] = len(order) - 1
    always = sum(s.nbytes for s in step.storages if s.static)
    return [
        always
        + what.workspace_bytes
        + sum(step.storages[s].nbytes for (made, s), until in blocks.items() if made <= position <= until)
        for position, (_, what, _) in enumerate(runs)
    ]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_equals_the_naive_reference(data):
    step = data.draw(steps(max_forward=8))
    order = data.draw(orders(step))
    timeline = simulate(step, order)
    assert timeline.bytes_held.tolist() == reference(step, order)
    assert timeline.peak_bytes == max(timeline.bytes_held)
    assert timeline.order[timeline.peak_position] == timeline.peak_rank
    assert step.nodes[timeline.peak_rank].name == timeline.peak_node


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_kinds_add_up_and_are_never_negative(data):
    step = data.draw(steps())
    timeline = simulate(step, data.draw(orders(step)))
    assert (sum(timeline.bytes_by_kind.values()) == timeline.bytes_held).all()
    assert all((held >= 0).all() for held in timeline.bytes_by_kind.values())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_seconds_are_those_of_the_runs(data):
    step = data.draw(steps())
    order = data.draw(orders(step))
    timeline = simulate(step, order)
    again = [rank for i, rank in enumerate(order) if rank in order[:i]]
    assert timeline.recompute_seconds == pytest.approx(sum(step.nodes[r].recipe.seconds for r in again))
    assert timeline.seconds == pytest.approx(step.seconds + timeline.recompute_seconds)


@settings(max_examples=60, deadline=None)
@given(steps())
def test_all_but_static_and_pinned_is_freed_at_the_end(step):
    build = StepBuilder(nodes=list(step.nodes), storages=list(step.storages), region=Region.OPTIMIZER)
    build.node("end")
    stays = sum(s.nbytes for s in step.storages if s.static or s.pinned)
    assert simulate(build.step(), range(len(build.nodes))).bytes_held[-1] == stays


def chain():
    build = StepBuilder()
    weight = build.given(100)
    first = build.op("a", (weight,), 10, 1.0, workspace=7)
    second = build.op("b", (first,), 20, 2.0)
    start = build.backward()
    gradient = build.grad((start, second), 3, 1.0)
    build.grad((gradient, first), 5, 1.0, pinned=True)
    return build.step()


def test_a_chain_by_hand():
    timeline = simulate(chain(), plain_order(chain()))
    assert timeline.bytes_held.tolist() == [100, 117, 130, 134, 137, 118]
    assert timeline.bytes_by_kind[Kind.OTHER].tolist() == [0, 7, 0, 0, 0, 0]
    assert timeline.bytes_by_kind[Kind.GRADIENT].tolist() == [0, 0, 0, 4, 7, 8]
    assert (timeline.peak_bytes, timeline.peak_position, timeline.peak_node) == (137, 4, "grad_4")


def test_a_recompute_lengthens_the_life_of_its_source():
    held = simulate(chain(), (0, 1, 2, 3, 2, 4, 5)).bytes_held.tolist()
    assert held == [100, 117, 130, 114, 134, 137, 118]


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ((0, 1, 2, 2, 3, 4, 5), "outside the backward part"),
        ((0, 1, 2, 3, 4, 5, 2), "after the last node"),
        ((0, 0, 1, 2, 3, 4, 5), "cannot be run again: an input of the step"),
        ((0, 1, 3, 2, 4, 5), "first run of rank 3 before that of 2"),
        ((0, 1, 2, 3, 4), "never runs"),
        ((0, 1, 2, 3, 4, 4, 5), "cannot be run again"),
        ((0, 1, 2, 3, 4, 5, 6), "no rank 6"),
    ],
)
def test_a_bad_order_is_refused(order, says):
    with pytest.raises(ValueError, match=says):
        simulate(chain(), order)


def test_reading_what_has_not_run_is_refused():
    build = StepBuilder()
    build.op("a", (1,), 1, 1.0)
    build.op("b", (), 1, 1.0)
    with pytest.raises(ValueError, match="reads 'b_1', which has not run"):
        simulate(build.step(), (0, 1))


def test_a_segment_is_recomputed_in_its_own_backward_only():
    build = StepBuilder()
    weight = build.given(1)
    first = build.op("a", (weight,), 10, 1.0)
    build.segment = 1
    second = build.op("b", (first,), 10, 1.0)
    start = build.backward(segment=1)
    gradient = build.grad((start, second), 1, 1.0)
    build.backward(segment=0)
    build.grad((gradient, first), 1, 1.0)
    step = build.step()
    simulate(step, (0, 1, 2, 3, 2, 4, 5, 1, 6))
    for order in [(0, 1, 2, 3, 1, 4, 5, 6), (0, 1, 2, 3, 4, 5, 2, 6), (0, 1, 2, 3, 4, 1, 5, 6)]:
        with pytest.raises(ValueError, match="outside the backward part of its segment"):
            simulate(step, order)
