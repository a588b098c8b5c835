"""One size that `lowtide.fit` looks at for a budget, and what it asks of it."""

from dataclasses import dataclass
from functools import cached_property

from lowtide.errors import BudgetTooSmall
from lowtide.facts import Run
from lowtide.plans import Plan
from lowtide.profiles import Profile


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A size and a budget. It is planned when somebody asks for its `plan`."""

    profile: Profile
    budget_bytes: int

    @property
    def fits_plain(self) -> bool:
        return self.profile.peak_bytes <= self.budget_bytes

    @property
    def fits(self) -> bool:
        return self.fits_plain or self.plan is not None

    @cached_property
    def plan(self) -> Plan | None:
        """The cheapest plan within the budget; None, often without a search, where there is none."""
        if self.has_none:
            return None
        try:
            return self.profile.plan(self.budget_bytes)
        except BudgetTooSmall:
            return None

    @property
    def has_none(self) -> bool:
        """Whether it is proven that no plan is within the budget."""
        bound = self.profile.floor_bound_bytes
        return bound is not None and bound > self.budget_bytes

    @property
    def is_searched(self) -> bool:
        return "plan" in vars(self) and not self.has_none

    @cached_property
    def lowest_runs(self) -> tuple[Run, ...]:
        """How the lowest plan that was found runs, which other sizes can run by as well."""
        return self.profile.plan(self.profile.floor_bytes).solution.schedule.runs
