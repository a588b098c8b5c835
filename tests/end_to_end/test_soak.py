"""Load: long runs, many shapes, many plans, two threads. `make soak` runs the long versions."""

import pytest
import soak

pytestmark = pytest.mark.slow

RESIDENT_SLACK = 8 << 20
"""What Python and torch's allocator may keep of a thousand steps, whatever they are."""


def test_steps_and_shapes_hold_nothing() -> None:
    both = soak.pair(rows=64)
    assert soak.growth_over(60, both, rows=64)[0] == 0
    assert soak.many_shapes(2, both) == 0


@pytest.mark.long
def test_two_models_in_two_threads() -> None:
    soak.two_threads(5)


@pytest.mark.long
def test_a_thousand_steps() -> None:
    storages, resident = soak.growth_over(1000, soak.pair(rows=64), rows=64)
    print(f"1000 steps: storages {storages:+d} bytes, resident {resident:+d} bytes")
    assert storages == 0
    assert resident < RESIDENT_SLACK


@pytest.mark.long
def test_a_hundred_shapes() -> None:
    assert soak.many_shapes(100, soak.pair(rows=110)) == 0


@pytest.mark.long
def test_twenty_plans() -> None:
    storages, objects = soak.many_plans(20)
    print(f"20 plans: storages {storages:+d} bytes, {objects:+d} objects since the tenth")
    assert storages <= 0


@pytest.mark.long
@pytest.mark.parametrize("attempt", range(10))
def test_two_threads_for_long(attempt: int) -> None:
    soak.two_threads(100)
