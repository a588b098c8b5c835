"""The incremental state equals the full simulation, whatever is put in and taken out."""

from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import steps
from test_simulate import reference

from lowtide.planning.search.runs import Runs
from lowtide.planning.search.table import make_table
from lowtide.planning.simulate import plain_runs, simulate


def slots_of(step, schedule):
    """The most bytes held in each slot; None for what does not run."""
    slots, most = [None] * len(step.nodes), 0
    for run, nbytes in zip(schedule, reference(step, schedule), strict=True):
        most = max(most, nbytes)
        if run.is_first:
            slots[run.rank], most = most, 0
    return slots


def found_slots(runs):
    return [nbytes if runs.runs[slot] else None for slot, nbytes in enumerate(runs.slot_bytes().tolist())]


def choices(table):
    return [
        (slot, remat)
        for slot in range(table.size)
        for remat, op in enumerate(table.remats)
        if table.slot_segment[slot] >= 0 and table.may_run(op.rank, slot)
    ]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_change_equals_the_full_simulation(data):
    step = data.draw(steps(max_forward=7))
    table = make_table(step)
    runs = Runs(table)
    possible = choices(table)
    assert found_slots(runs) == slots_of(step, runs.schedule())
    present = set()
    for run in data.draw(st.lists(st.sampled_from(possible), max_size=12)) if possible else []:
        if run in present:
            runs.remove(*run)
            present.remove(run)
        else:
            runs.insert(*run)
            present.add(run)
        order = runs.schedule()
        timeline = simulate(step, order)
        assert found_slots(runs) == slots_of(step, order)
        assert runs.peak_bytes() == timeline.peak_bytes
        assert abs(runs.added_seconds - timeline.added_seconds) < 1e-9
    assert runs.plan() == present
    mark = len(runs.journal)
    before = runs.slot_bytes().tolist()
    for run in data.draw(st.lists(st.sampled_from(possible), max_size=5)) if possible else []:
        (runs.remove if run in runs.plan() else runs.insert)(*run)
    runs.rollback(mark)
    assert (runs.plan(), runs.slot_bytes().tolist()) == (present, before)
    runs.go_to(())
    assert runs.schedule() == plain_runs(step)
    assert found_slots(runs) == slots_of(step, runs.schedule())
