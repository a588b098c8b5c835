"""Few questions find the largest size within a budget, whatever its bytes look like."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.experiments.interpolate_step import last_within


@given(
    st.integers(1, 8),
    st.integers(1, 10_000),
    st.integers(0, 1000),
    st.sampled_from([1.0, 1.3, 2.0, 0.7]),
    st.integers(0, 10**7),
    st.lists(st.integers(1, 200), max_size=3),
)
def test_it_is_the_last_that_fits(unit, slope, start, power, budget, first):
    most = 5000 // unit * unit

    def needed(size):
        return start + slope * size**power

    first = sorted({unit * size for size in first if unit * size <= most})
    found = last_within(budget, needed, low=0, high=most + unit, unit=unit, most=most, first=first)
    assert found % unit == 0 and 0 <= found <= most
    assert found == 0 or needed(found) <= budget
    assert found == most or needed(found + unit) > budget


@pytest.mark.parametrize("budget", [700, 70_000, 7_000_000])
def test_a_line_takes_few_questions(budget):
    asked = []

    def needed(size):
        asked.append(size)
        return 100 + 13 * size

    found = last_within(budget, needed, low=0, high=(1 << 20) + 1, unit=1, most=1 << 20, first=[8, 16])
    assert found == (budget - 100) // 13
    assert len(asked) <= 10


def test_what_nobody_knows_is_no_guess():
    assert last_within(10, lambda size: None, low=0, high=11, unit=1, most=10) is None
