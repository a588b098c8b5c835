"""The incremental state equals the full simulation, whatever is put in and taken out."""

from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import steps
from test_simulate import reference

from lowtide.planning.search.runs import Runs
from lowtide.planning.search.table import make_table
from lowtide.planning.simulate import simulate


def slots_of(step, order):
    held, slots, most = reference(step, order), [], 0
    seen = set()
    for rank, nbytes in zip(order, held, strict=True):
        most = max(most, nbytes)
        if rank not in seen:
            seen.add(rank)
            slots.append(most)
            most = 0
    return slots


def choices(table):
    return [
        (slot, rank)
        for slot in range(table.size)
        for rank in range(table.size)
        if table.slot_segment[slot] >= 0 and table.may_run(rank, slot)
    ]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_change_equals_the_full_simulation(data):
    step = data.draw(steps(max_forward=7))
    table = make_table(step)
    runs = Runs(table)
    possible = choices(table)
    assert runs.slot_bytes().tolist() == slots_of(step, runs.order())
    present = set()
    for run in data.draw(st.lists(st.sampled_from(possible), max_size=12)) if possible else []:
        if run in present:
            runs.remove(*run)
            present.remove(run)
        else:
            runs.insert(*run)
            present.add(run)
        order = runs.order()
        timeline = simulate(step, order)
        assert runs.slot_bytes().tolist() == slots_of(step, order)
        assert runs.peak_bytes() == timeline.peak_bytes
        assert abs(runs.recompute_seconds - timeline.recompute_seconds) < 1e-9
    assert runs.plan() == present
    mark = len(runs.journal)
    before = runs.slot_bytes().tolist()
    for run in data.draw(st.lists(st.sampled_from(possible), max_size=5)) if possible else []:
        (runs.remove if run in runs.plan() else runs.insert)(*run)
    runs.rollback(mark)
    assert (runs.plan(), runs.slot_bytes().tolist()) == (present, before)
    runs.go_to(())
    assert runs.order() == tuple(range(table.size))
    assert runs.slot_bytes().tolist() == slots_of(step, runs.order())
