import inspect
import re

import pytest

from lowtide import errors
from lowtide.errors import BudgetTooSmall, LowtideError

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_one_tree(kind):
    assert issubclass(kind, LowtideError)


def test_the_drawn_tree_is_the_real_one():
    drawn = re.findall(r"^[│├└─ ]*([A-Z]\w+)", errors.__doc__, re.MULTILINE)
    assert {kind.__name__ for kind in ALL} <= set(drawn)


def test_budget_too_small_says_the_floor_and_where():
    error = BudgetTooSmall(budget_bytes=100, floor_bytes=250, node="conv2d_7")
    assert (error.budget_bytes, error.floor_bytes, error.node) == (100, 250, "conv2d_7")
    assert "250" in str(error) and "conv2d_7" in str(error) and "\n" not in str(error)
