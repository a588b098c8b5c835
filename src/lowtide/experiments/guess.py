"""The largest size whose bytes, which lie near to a line, are within a budget: found with few questions."""

from collections.abc import Callable, Mapping, Sequence
from itertools import count

MOST_GROWTH = 16
"""How many times as large a size is asked for next, at most."""


def last_within(
    budget_bytes: int,
    needed: Callable[[int], float | None],
    *,
    low: int,
    high: int,
    unit: int,
    most: int,
    first: Sequence[int] = (),
) -> int | None:
    """The largest multiple of `unit` from `low` to below `high` that needs at most the budget.

    Larger sizes need more; `low` is not asked about, and is taken to fit. None where `needed` does not know.
    Sizes of `first` are asked about first; nothing is above `most`.
    """
    told: dict[int, float] = {}
    for turn in count():
        if high - low <= unit:
            return low
        untold = [size for size in first if low < size < high and size not in told]
        limit = min(high, MOST_GROWTH * max(low, unit)) if high > most else high
        halve = turn % 4 == 3
        size = untold[0] if untold else _next(budget_bytes, told, low, limit, unit=unit, halve=halve)
        nbytes = needed(size)
        if nbytes is None:
            return None
        told[size] = nbytes
        low, high = (low, size) if nbytes > budget_bytes else (size, high)
    raise AssertionError


def _next(
    budget_bytes: int, told: Mapping[int, float], low: int, high: int, *, unit: int, halve: bool
) -> int:
    """Where the line through the two sizes next to the budget meets it, between `low` and `high`."""
    size = (low + high) // 2
    near = sorted(told, key=lambda one: (abs(told[one] - budget_bytes), one))[:2]
    if len(near) == 2 and not halve:
        one, other = near
        slope = (told[other] - told[one]) / (other - one)
        if slope > 0:
            size = int(one + (budget_bytes - told[one]) / slope)
    return max(low + unit, min(size // unit * unit, high - unit))
