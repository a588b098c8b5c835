"""Bytes and seconds after each drop equal the full simulation of the same schedule."""

from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import steps
from test_simulate import reference

from lowtide.planning.search.dropped_storages import DroppedStorages, retain_only
from lowtide.planning.search.table import Table, remats_in, schedule_of
from lowtide.planning.simulate import simulate


def slots_of(step, schedule):
    """The most live bytes in each slot; None for a node that does not run."""
    slots, most = [None] * len(step.nodes), 0
    for run, nbytes in zip(schedule, reference(step, schedule), strict=True):
        most = max(most, nbytes)
        if run.is_first:
            slots[run.rank], most = most, 0
    return slots


@settings(max_examples=150, deadline=None)
@given(steps(max_forward=10), st.randoms(use_true_random=False))
def test_every_drop_equals_the_full_simulation(step, random):
    table = Table(step)
    storages = [s for s in table.uses if not step.storages[s].pinned]
    random.shuffle(storages)
    state = DroppedStorages(table)
    for count in range(len(storages) + 1):
        dropped = storages[:count]
        if dropped:
            state.drop(dropped[-1])
        assert state.remats == retain_only(table, table.uses.keys() - set(dropped))
        schedule = schedule_of(table, state.remats)
        assert remats_in(table, schedule) == state.remats
        expected = slots_of(step, schedule)
        found = state.slot_bytes().tolist()
        assert [n if e is not None else None for n, e in zip(found, expected, strict=True)] == expected
        timeline = simulate(step, schedule)
        assert state.peak_bytes() == timeline.peak_bytes
        assert abs(state.added_seconds - timeline.added_seconds) < 1e-9
