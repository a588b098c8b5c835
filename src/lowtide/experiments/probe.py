"""One size that `lowtide.fit` looks at, and what it asks of it."""

from dataclasses import dataclass
from functools import cached_property

from lowtide.errors import BudgetTooSmall
from lowtide.facts import Step
from lowtide.planning.bounds.curve import Bounds
from lowtide.planning.search.table import make_table
from lowtide.plans import Plan
from lowtide.profiles import Profile


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A size that was looked at. It is planned when somebody asks for its `plan`.

    Unless it was `captured`, it was made on paper from those that were.
    """

    profile: Profile
    budget_bytes: int
    captured: bool

    @property
    def fits_plain(self) -> bool:
        return self.profile.peak_bytes <= self.budget_bytes

    @property
    def fits(self) -> bool:
        return self.fits_plain or self.plan is not None

    @cached_property
    def bounds(self) -> Bounds:
        return bounds_of(self.profile.step)

    @cached_property
    def plan(self) -> Plan | None:
        """The cheapest plan within the budget; None, often without a search, where there is none."""
        if self.bounds.floor_bytes > self.budget_bytes:
            return None
        try:
            return self.profile.plan(self.budget_bytes)
        except BudgetTooSmall:
            return None

    @property
    def floor_ratio(self) -> float:
        """How many times the bytes that it is proven to need its lowest plan holds; 1 if never searched."""
        is_searched = "plan" in vars(self) and self.bounds.floor_bytes <= self.budget_bytes
        return self.profile.floor_bytes / self.bounds.floor_bytes if is_searched else 1.0

    @property
    def bound_ratio(self) -> float:
        """How many times the proven time to recompute, at least, its plan takes."""
        if self.plan is None or not self.plan.lower_bound_seconds:
            return 1.0
        return self.plan.recompute_seconds / self.plan.lower_bound_seconds


def bounds_of(step: Step) -> Bounds:
    return Bounds(make_table(step))
