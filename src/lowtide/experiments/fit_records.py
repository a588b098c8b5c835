"""What `lowtide.fit` is asked, and what it finds."""

from collections.abc import Callable
from dataclasses import dataclass, field

from lowtide.errors import LowtideError
from lowtide.facts.sizes import parse_size
from lowtide.units import format_size

MOST = 1 << 20
"""No larger size is looked at, unless said otherwise."""


Budgets = list[str] | list[int] | list[str | int] | tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vary:
    """What grows: its name, what throughput counts, and how many of these a step of some size has.

    `degree`: that of the polynomial by which bytes grow. All sizes are multiples of `multiple_of`.
    """

    name: str = "batch size"
    unit: str = "samples"
    amount: Callable[[int], int] = lambda size: size
    degree: int = 1
    multiple_of: int = 1
    most: int = MOST

    def __post_init__(self) -> None:
        if self.multiple_of < 1:
            raise LowtideError(f"sizes cannot be multiples of {self.multiple_of}: say 1 or more")
        if self.most < self.multiple_of:
            raise LowtideError(
                f"there is no multiple of {self.multiple_of} up to {self.most}: allow larger sizes"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRow:
    """One size that fits, all of it predicted. `peak_bytes` and `recompute_seconds` are with a plan that
    meets the budget, or without any where none is needed. Of sizes that were not `profiled` themselves,
    all figures are from those around them, and the peak is at most `peak_bytes`.
    """

    size: int
    plain_peak_bytes: int
    peak_bytes: int
    step_seconds: float
    recompute_seconds: float
    per_second: float | None
    profiled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What running a size showed. `exact` is None where nobody compared; where nothing was measured,
    `reason` says why. `planned`: with its plan, else without any.
    """

    size: int
    planned: bool
    predicted_peak_bytes: int
    measured_peak_bytes: int | None = None
    exact: bool | None = None
    differences: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What fits into a budget; made by `lowtide.fit`.

    `largest_plain` fits without a plan, and the next size does not, by prediction; 0 where none fits.
    `largest` is the largest size for which a plan was found. It is proven that no plan exists above
    `no_plan_above`, and between the two nobody knows; None where nothing is proven, or nothing larger was
    looked at. No plan of the smallest size that was looked at needs less than `lowest_bytes`. Nothing above
    `most` was looked at. `rows` are by size, `checks` were measured.
    """

    budget_bytes: int
    vary: str
    unit: str
    multiple_of: int
    most: int
    largest_plain: int
    largest: int
    lowest_bytes: int
    no_plan_above: int | None = None
    rows: tuple[FitRow, ...] = field(default=(), repr=False)
    checks: tuple[Check, ...] = field(default=(), repr=False)

    @property
    def fastest(self) -> FitRow | None:
        """Of the rows that fit, the one with the highest predicted throughput; the smallest of equals."""
        fitting = [row for row in self.rows if row.per_second is not None]
        return max(fitting, key=lambda row: (row.per_second, -row.size), default=None)

    def __repr__(self) -> str:
        fastest = "" if self.fastest is None else f", fastest={self.fastest.size}"
        return (
            f"Fit(budget={format_size(self.budget_bytes)}, {self.vary}: largest without a plan="
            f"{self.largest_plain}, largest={self.largest}{fastest}, {len(self.rows)} rows)"
        )


def budget_bytes_of(budget: str | int) -> int:
    """Bytes of a budget that is the same for all sizes."""
    if isinstance(budget, str) and budget.strip().endswith("%"):
        raise LowtideError(
            f"'{budget}' is a share of one size's own peak, and here sizes differ: write bytes, such as 8GiB"
        )
    return parse_size(budget)
