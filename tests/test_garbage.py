"""Python's garbage collector rests while graphs and plans are made, and is as it was afterwards."""

import gc

import pytest
from synthetic import chain

from lowtide.errors import BudgetTooSmall
from lowtide.garbage import NEW_OBJECTS, rarely_collected
from lowtide.planning.planner import Planner


@pytest.fixture
def threshold():
    before = gc.get_threshold()
    yield gc.set_threshold
    gc.set_threshold(*before)


def test_garbage_is_looked_for_rarely_and_then_as_before() -> None:
    before = gc.get_threshold()
    with rarely_collected():
        with rarely_collected():
            assert gc.get_threshold()[0] == NEW_OBJECTS
        assert gc.get_threshold()[0] == NEW_OBJECTS
    assert gc.get_threshold() == before


def test_a_user_without_collections_keeps_it_so(threshold) -> None:
    threshold(0)
    with rarely_collected():
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold()[0] == 0


def test_nothing_is_collected_while_a_plan_is_made(threshold):
    step = chain(length=12)
    found = []
    threshold(10, 10, 10)
    gc.callbacks.append(watch := lambda phase, info: found.append(phase))
    try:
        planner = Planner(step)
        found.clear()
        with pytest.raises(BudgetTooSmall):
            planner.solve(budget_bytes=1)
        during = len(found)
    finally:
        gc.callbacks.remove(watch)
    assert during < 10  # for what stands between the calls
    assert gc.get_threshold() == (10, 10, 10)
