"""The simulator against a naive reference, and what a schedule may not do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import StepBuilder, orders, runs, steps

from lowtide.facts import Kind, Region
from lowtide.planning.simulate import baseline_runs, simulate


def reference(step, schedule):
    """Bytes held at every run, by asking for each block and each position: is anyone still to read it?"""
    last_run, runs = {}, []
    for position, run in enumerate(schedule):
        node = step.nodes[run.rank]
        what = node if run.is_first else next(r for r in node.remats if r.rule == run.rule)
        runs.append((run, what, {read: last_run[read] for read in what.reads}))
        last_run[run.rank] = position

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
        run, what, sources = runs[reader]
        if position not in sources.values():
            return False
        makes_nothing = not what.makes and len(what.reads) == 1
        is_part = set(what.holds) < set(step.nodes[runs[position][0].rank].holds)
        return not (not run.is_first and makes_nothing and runs[position][0].is_first and is_part)

    def read_until(position):
        return max([position] + [p for p in range(len(runs)) if reads(p, position)])

    blocks = {}
    for position, (run, what, _) in enumerate(runs):
        for storage in (*what.holds, *what.makes):
            if not step.storages[storage].static:
                block = block_of(position, storage)
                blocks[block] = max(blocks.get(block, 0), read_until(position))
                if step.storages[storage].pinned and run.is_first and position == block[0]:
                    blocks[block] = len(schedule) - 1
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
    step = data.draw(steps(max_forward=8, offload=data.draw(st.booleans())))
    order = data.draw(orders(step))
    timeline = simulate(step, order)
    assert timeline.live_bytes.tolist() == reference(step, order)
    assert timeline.peak_bytes == max(timeline.live_bytes)
    assert timeline.order[timeline.peak_position] == timeline.peak_rank
    assert step.nodes[timeline.peak_rank].name == timeline.peak_node


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_kinds_add_up_and_are_never_negative(data):
    step = data.draw(steps())
    timeline = simulate(step, data.draw(orders(step)))
    assert (sum(timeline.bytes_by_kind.values()) == timeline.live_bytes).all()
    assert all((held >= 0).all() for held in timeline.bytes_by_kind.values())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_seconds_are_those_of_the_runs(data):
    step = data.draw(steps())
    order = data.draw(orders(step))
    timeline = simulate(step, order)
    plain = sum(node.seconds for node in step.nodes if not node.on_demand)
    again = [r.seconds for run in order for r in step.nodes[run.rank].remats if r.rule == run.rule]
    kept = [step.nodes[run.rank].seconds for run in order if step.nodes[run.rank].on_demand]
    assert timeline.added_seconds == pytest.approx(sum(again) + sum(kept))
    assert timeline.seconds == pytest.approx(plain + timeline.added_seconds)


@settings(max_examples=60, deadline=None)
@given(steps())
def test_all_but_static_and_pinned_is_freed_at_the_end(step):
    build = StepBuilder(nodes=list(step.nodes), storages=list(step.storages), region=Region.OPTIMIZER)
    build.node("end")
    stays = sum(s.nbytes for s in step.storages if s.static or s.pinned)
    assert simulate(build.step(), baseline_runs(build.step())).live_bytes[-1] == stays


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
    timeline = simulate(chain(), baseline_runs(chain()))
    assert timeline.live_bytes.tolist() == [100, 117, 130, 134, 137, 118]
    assert timeline.bytes_by_kind[Kind.OTHER].tolist() == [0, 7, 0, 0, 0, 0]
    assert timeline.bytes_by_kind[Kind.GRADIENT].tolist() == [0, 0, 0, 4, 7, 8]
    assert (timeline.peak_bytes, timeline.peak_position, timeline.peak_node) == (137, 4, "grad_4")


def test_a_recompute_lengthens_the_life_of_its_source():
    held = simulate(chain(), runs(0, 1, 2, 3, 2, 4, 5)).live_bytes.tolist()
    assert held == [100, 117, 130, 114, 134, 137, 118]


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ((0, 1, 2, 2, 3, 4, 5), "outside the backward part"),
        ((0, 1, 2, 3, 4, 5, 2), "after the last node"),
        ((0, 0, 1, 2, 3, 4, 5), "cannot be rematerialized: an input of the step"),
        ((0, 1, 3, 2, 4, 5), "first run of rank 3, where that of 2 is due"),
        ((0, 1, 2, 3, 4), "never runs"),
        ((0, 1, 2, 3, 4, 4, 5), "not a forward node"),
        ((0, 1, 2, 3, 4, 5, 6), "no rank 6"),
        ((0, 1, 2, 3, (2, "magic"), 4, 5), "has no remat 'magic'"),
        ((0, 1, (2, "again"), 2, 3, 4, 5), "rematerialized before it has run"),
        ((0, 1, 2, 3, (3, ""), 4, 5), "first run of rank 3, where that of 4 is due"),
    ],
)
def test_a_bad_order_is_refused(order, says):
    with pytest.raises(ValueError, match=says):
        simulate(chain(), runs(*order))


def test_reading_what_has_not_run_is_refused():
    build = StepBuilder()
    build.op("a", (1,), 1, 1.0)
    build.op("b", (), 1, 1.0)
    with pytest.raises(ValueError, match="reads 'b_1', which has not run"):
        simulate(build.step(), runs(0, 1))


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
    simulate(step, runs(0, 1, 2, 3, 2, 4, 5, 1, 6))
    for order in [(0, 1, 2, 3, 1, 4, 5, 6), (0, 1, 2, 3, 4, 5, 2, 6), (0, 1, 2, 3, 4, 1, 5, 6)]:
        with pytest.raises(ValueError, match="outside the backward part of its segment"):
            simulate(step, runs(*order))


def packing():
    """`a` of 40 bytes, which can be kept as 10; rank 2 packs it."""
    build = StepBuilder()
    build.packed(build.given(100), 40, 8.0)
    start = build.backward()
    build.grad((start, 1), 5, 1.0)
    return build.step()


def test_what_runs_on_demand_is_made_only_where_a_remat_reads_it():
    step = packing()
    assert simulate(step, baseline_runs(step)).live_bytes.tolist() == [100, 140, 144, 149]
    packed = simulate(step, runs(0, 1, 2, 3, (1, "unpack"), 4))
    assert packed.live_bytes.tolist() == [100, 140, 150, 114, 155, 149]
    assert packed.added_seconds == 1.0 + 2.0
    with pytest.raises(ValueError, match="reads 'pack_2', which has not run"):
        simulate(step, runs(0, 1, 3, (1, "unpack"), 4))
