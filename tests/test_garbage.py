"""Python's collector of cycles rests while a plan is made, and is as it was afterwards."""

import gc

import pytest
from synthetic import chain

from lowtide.errors import BudgetTooSmall
from lowtide.planning.planner import Planner


@pytest.fixture
def collections():
    """What the collector does, though it would look for cycles after every few records."""
    found = []
    before = gc.get_threshold()
    gc.set_threshold(10, 10, 10)
    gc.callbacks.append(watch := lambda phase, info: found.append(phase))
    yield found
    gc.callbacks.remove(watch)
    gc.set_threshold(*before)


def test_no_cycles_are_looked_for_while_a_plan_is_made(collections):
    step = chain(length=12)
    budget_bytes = Planner(step).plain.peak_bytes - 1000
    collections.clear()
    Planner(step).solve(budget_bytes=budget_bytes)
    during = len(collections)
    records = [[] for _ in range(1000)]
    assert len(collections) > during + 10, len(records)
    assert during < 10  # for what stands between the calls


@pytest.mark.parametrize("enabled", (True, False))
def test_the_collector_is_as_it_was_also_where_no_plan_fits(enabled):
    desk = Planner(chain(length=12))
    if not enabled:
        gc.disable()
    try:
        with pytest.raises(BudgetTooSmall):
            desk.solve(budget_bytes=1)
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
