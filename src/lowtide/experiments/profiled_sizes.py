"""The profiled sizes of one step, and interpolated answers for all other sizes, for any budget.

The first size is captured and its ops are timed. From it, the search extrapolates the second size to capture;
the seconds of that size are scaled. All other sizes are interpolated from captured ones with the same ops;
where a size matters, its workspaces are measured (`interpolate`).
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import inf

from lowtide.errors import BudgetTooSmall, CaptureError, TargetError
from lowtide.experiments import interpolate
from lowtide.experiments.fit import Vary
from lowtide.experiments.interpolate import (
    Form,
    Workspaces,
    extrapolate_step,
    form_of,
    interpolate_peak,
    interpolate_step,
)
from lowtide.facts import Run, Step
from lowtide.ops.calls import OpCost
from lowtide.planning.lower_bounds import Bounds
from lowtide.planning.search.table import Table
from lowtide.plans import Plan
from lowtide.profiles import Profile
from lowtide.profiling.costing import KnownCosts, workspace_bytes
from lowtide.profiling.op_costs import ShortTimeLimit, short_time_limit
from lowtide.zoo.targets import Target, TargetSpec

logger = logging.getLogger("lowtide")

FAR = 8
"""The factor from the only captured size to the size that is extrapolated from it."""
MOST_ERROR = 0.01
"""The largest error of a usable interpolated peak, as a share."""
LEAST_SHARE = 100
"""Workspaces below this part of the budget are not measured."""
SOME_TAKEN = "If only some are taken, say which they are multiples of (multiple_of, --multiple-of)"

Source = TargetSpec | Target
Profiler = Callable[[Source], Profile]
Working = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, eq=False, kw_only=True)
class ProfiledSize:
    """A size that was `captured`, or interpolated with its workspaces measured.

    Sizes of equal `form` have the same ops.
    """

    profile: Profile
    captured: bool
    form: int


@dataclass(slots=True, kw_only=True)
class ProfiledSizes:
    """`least_bytes`: workspaces that should be smaller are not measured. `degree`: the degree of the
    polynomial by which bytes grow, from `vary`, or higher where captured sizes show it."""

    source: Callable[[int], Source]
    vary: Vary
    profiler: Profiler
    working: Working
    least_bytes: int = 0
    profiled: dict[int, ProfiledSize] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    degree: int = field(init=False)
    _forms: list[Form] = field(default_factory=list)
    _timed: dict[str, OpCost] = field(default_factory=dict)
    _known: KnownCosts | None = None
    _workspaces: dict[tuple[int, tuple[int, ...]], Workspaces] = field(default_factory=dict)
    _steps: dict[int, Step] = field(default_factory=dict)
    """interpolated from the current profiled sizes"""
    _margin: float | None = None
    _far: Bounds | None = None

    def __post_init__(self) -> None:
        self.degree = self.vary.degree

    @property
    def most(self) -> int:
        """The largest size to consider."""
        unit = self.vary.multiple_of
        return min([self.vary.most // unit * unit, *(size - unit for size in self.refused)])

    @property
    def captured(self) -> dict[int, ProfiledSize]:
        return {size: found for size, found in self.profiled.items() if found.captured}

    def capture(self, size: int) -> None:
        """Capture one size and measure its ops, or scale the costs of the first size.

        A `refused` size above all captured ones is the upper limit of all sizes; a smaller one is an error.
        """
        if size in self.captured:
            return
        limit = ShortTimeLimit(measured=self._timed, known=self._known, least_bytes=self.least_bytes)
        try:
            with self.working(f"{self.vary.name} {size}"), short_time_limit(limit):
                found = self.profiler(self.source(size))
        except (CaptureError, TargetError) as error:
            if not self.captured:
                raise
            words, larger = str(error).rstrip("."), max(self.captured)
            if size < larger:
                raise type(error)(
                    f"{self.vary.name} {size} is refused and {larger} is not: {words}. {SOME_TAKEN}"
                ) from error
            logger.warning(
                "no %s from %s on is profiled, since the model refuses that one: %s. %s",
                self.vary.name,
                size,
                words,
                SOME_TAKEN,
            )
            self.refused.add(size)
            return
        if self._known is None:
            self._known = found.known
        # without its model: there would be one for each size
        self._add(size, Profile(found.step, found.known), captured=True)

    def profile(self, size: int) -> None:
        """Interpolate one size and measure its workspaces; capture it where that fails."""
        if size in self.profiled:
            return
        step = None if self.may_be_refused(size) else self._interpolate_and_measure(size)
        if step is None:
            self.capture(size)
        else:
            self._add(size, Profile(step), captured=False)

    def _add(self, size: int, profile: Profile, *, captured: bool) -> None:
        form = form_of(profile.step)
        if form not in self._forms:
            self._forms.append(form)
        added = ProfiledSize(profile=profile, captured=captured, form=self._forms.index(form))
        self.profiled[size] = added
        self._steps.clear()
        self._margin = None
        if not captured:
            return
        # captured sizes show the degree: what a factory does with its argument is unknown
        for other, found in self.captured.items():
            small, large = sorted((size, other))
            if found.form == added.form and large >= 2 * small:
                steps = {one: self.profiled[one].profile.step for one in (small, large)}
                least_bytes = MOST_ERROR * self.profiled[large].profile.peak_bytes
                self.degree = interpolate.degree_shown(self.degree, steps, least_bytes=least_bytes)

    def _interpolate_and_measure(self, size: int) -> Step | None:
        captured = self.captured
        chosen = self._alike(size, captured)
        known = {one: found for one in chosen if (found := captured[one].profile.known) is not None}
        if len(known) <= self.degree:
            return None
        # small sizes may lack ops; all larger captured sizes must have the same ops
        form = captured[chosen[0]].form
        if any(found.form != form for one, found in captured.items() if one > min(chosen)):
            return None
        nearest = min(captured, key=lambda one: (abs(one - size), one))
        if (
            captured[nearest].form != form
            and self._error(nearest, {one: captured[one] for one in chosen}) > MOST_ERROR
        ):
            return None
        step = interpolate_step(size, {one: captured[one].profile.step for one in chosen})
        workspaces = self._workspaces.setdefault(
            (self.least_bytes, tuple(sorted(chosen))),
            Workspaces(known, least_bytes=self.least_bytes, measure=workspace_bytes),
        )
        with self.working(f"{self.vary.name} {size}"):
            return workspaces.measured(step, size)

    def _alike(self, size: int, profiled: dict[int, ProfiledSize]) -> list[int]:
        forms = {other: found.form for other, found in profiled.items()}
        return interpolate.sizes_alike(size, forms, degree=self.degree)

    def may_be_refused(self, size: int) -> bool:
        """Whether the model may refuse a size: it refused one, and no captured size is as large."""
        return bool(self.refused) and size > max(self.captured)

    def is_apart(self, size: int) -> bool:
        return interpolate.is_apart(size, list(self.captured))

    def neighbours(self, size: int) -> list[int]:
        """The sizes that `size` is interpolated from, empty where there are none; itself where profiled."""
        return [size] if size in self.profiled else self._alike(size, self.profiled)

    def step_at(self, size: int) -> Step | None:
        """The step at a size; None where it cannot be interpolated."""
        if size in self.profiled:
            return self.profiled[size].profile.step
        if size not in self._steps:
            chosen = self.neighbours(size)
            if not chosen:
                return None
            steps = {one: self.profiled[one].profile.step for one in chosen}
            self._steps[size] = interpolate_step(size, steps)
        return self._steps[size]

    def peak_bytes(self, size: int) -> int | None:
        """The baseline peak of a size; None where it cannot be interpolated."""
        return self._peak_bytes(size, self.profiled)

    def _peak_bytes(self, size: int, profiled: dict[int, ProfiledSize]) -> int | None:
        if size in profiled:
            return profiled[size].profile.peak_bytes
        chosen = self._alike(size, profiled)
        if not chosen:
            return None
        timelines = {one: profiled[one].profile.timeline for one in chosen}
        if len({timeline.runs for timeline in timelines.values()}) == 1:
            return interpolate_peak(size, {one: timeline.live_bytes for one, timeline in timelines.items()})
        step = interpolate_step(size, {one: profiled[one].profile.step for one in chosen})
        return Profile(step).peak_bytes

    def step_seconds(self, size: int) -> float:
        """The time of a size without a plan: on the line between the captured ones next to it, whatever their
        ops; beyond them, from two with the same ops."""
        captured = self.captured
        if size in captured:
            return captured[size].profile.step_seconds
        below = [other for other in captured if other < size]
        above = [other for other in captured if other > size]
        near = [max(below), min(above)] if below and above else self._alike(size, captured)[:2]
        seconds_at = interpolate.interpolate_seconds(size, near)
        return seconds_at([captured[one].profile.step_seconds for one in near])

    def floor_bytes(self, size: int) -> int | None:
        """About the lower bound of a size's peak with any plan; None where it cannot be interpolated."""
        if size in self.profiled:
            return self.profiled[size].profile.bounds.floor_bytes
        if len(self.profiled) == 1:
            return self._extrapolated_floor(size)
        chosen = self.neighbours(size)
        return (
            _floor_from(size, {one: self.profiled[one].profile.bounds for one in chosen}) if chosen else None
        )

    def _extrapolated_floor(self, size: int) -> int:
        """From one size. All growing storages grow by the full degree here, so the next captured size is
        rather too small than too large."""
        [(only, found)] = self.profiled.items()
        degree, far = self.degree, FAR * only
        if self._far is None:
            self._far = Bounds(Table(extrapolate_step(found.profile.step, Fraction(FAR) ** degree)))
        return _floor_from(size**degree, {only**degree: found.profile.bounds, far**degree: self._far})

    @property
    def margin(self) -> float:
        """Twice the largest error of a profiled size's peak when it is interpolated from smaller and larger
        ones, as a share; infinite where that is unknown or large."""
        if self._margin is None:
            between = sorted(self.profiled)[1:-1]
            errors = [
                self._error(size, {one: found for one, found in self.profiled.items() if one != size})
                for size in between
            ]
            is_known = len(between) >= self.degree and max(errors) <= MOST_ERROR
            self._margin = 2 * max(errors) if is_known else inf
        return self._margin

    def _error(self, size: int, others: dict[int, ProfiledSize]) -> float:
        """The error of a profiled size's peak when it is interpolated from others, as a share."""
        nbytes = self._peak_bytes(size, others)
        return inf if nbytes is None else abs(nbytes / self.profiled[size].profile.peak_bytes - 1)


def _floor_from(size: int, chosen: dict[int, Bounds]) -> int:
    ranks = sorted({rank for bounds in chosen.values() for rank in bounds.floor_ranks})
    if not ranks:
        return max(bounds.floor_bytes for bounds in chosen.values())
    return interpolate_peak(
        size, {one: [bounds.at(rank).least_bytes for rank in ranks] for one, bounds in chosen.items()}
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class SizeInBudget:
    """One size and one budget. The first read of `plan` searches for it."""

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
        """The schedule of the lowest plan found; other sizes can run by it as well."""
        return self.profile.plan(self.profile.floor_bytes).solution.schedule.runs
