"""The sizes of one step that were looked at, and what they tell of all others, whatever the budget.

The first size is captured and its ops are timed; from it alone a guess is made at the size that matters,
which is captured next, with its seconds scaled. Bytes at any other size lie on the line, or parabola, through
the captured ones, as far as they have the same ops (`between`). What ops hold inside does not: of a size that
is looked at, that is measured (`inside`).

One size that `lowtide.fit` looks at for a budget, and what it asks of it.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import inf

from lowtide.errors import BudgetTooSmall, CaptureError, TargetError
from lowtide.experiments.fit_records import Vary
from lowtide.experiments.interpolate_step import (
    APART,
    Form,
    degree_shown,
    form_of,
    peak_from,
    scaled,
    seconds_by,
    sizes_alike,
    step_from,
)
from lowtide.experiments.interpolate_workspace import Insides
from lowtide.facts import Run, Step
from lowtide.ops.calls import OpCost
from lowtide.planning.bounds.lower_bounds import Bounds
from lowtide.planning.search.table import make_table
from lowtide.plans import Plan
from lowtide.profiles import Profile
from lowtide.profiling.costing import KnownCosts, workspace_bytes
from lowtide.profiling.op_costs import ShortTimeLimit, short_time_limit
from lowtide.zoo.targets import Target, TargetSpec

logger = logging.getLogger("lowtide")

FAR = 8
"""How many times the only captured size the one is that is guessed from it alone."""
MOST_ERROR = 0.01
"""Paper that is further off than this share tells nothing."""
LEAST_SHARE = 100
"""What an op should hold inside, as a part of the budget, to be asked what it does."""
SOME_TAKEN = "If only some are taken, say which they are multiples of (multiple_of, --multiple-of)"

Source = TargetSpec | Target
Profiler = Callable[[Source], Profile]
Working = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Look:
    """A size that was looked at: `captured`, or made on paper with what its ops hold inside measured.

    `form` numbers the different kinds of steps.
    """

    profile: Profile
    captured: bool
    form: int


@dataclass(slots=True, kw_only=True)
class Sizes:
    """`least_bytes`: ops that should hold less inside are not asked what they do."""

    source: Callable[[int], Source]
    vary: Vary
    profile: Profiler
    working: Working
    least_bytes: int = 0
    looks: dict[int, Look] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    version: int = 0
    """how often something new was learnt: what was told before is told anew then"""
    degree: int = 1
    """that of the polynomial by which bytes grow: as told, or more where captured sizes show it"""
    _forms: list[Form] = field(default_factory=list)
    _timed: dict[str, OpCost] = field(default_factory=dict)
    _known: KnownCosts | None = None
    _insides: dict[tuple[int, tuple[int, ...]], Insides] = field(default_factory=dict)
    _papers: dict[tuple[int, int], Step] = field(default_factory=dict)
    _margin: tuple[int, float] = (-1, inf)
    _far: Bounds | None = None

    def __post_init__(self) -> None:
        self.degree = self.vary.degree

    @property
    def most(self) -> int:
        """The largest size to look at."""
        unit = self.vary.multiple_of
        return min([self.vary.most // unit * unit, *(size - unit for size in self.refused)])

    @property
    def captured(self) -> dict[int, Look]:
        return {size: look for size, look in self.looks.items() if look.captured}

    def capture(self, size: int) -> None:
        """Capture one size and measure its ops, or scale what was measured of the first size.

        One that is `refused`, and larger than all captured ones, is the end of what can be looked at; a
        smaller one is an error.
        """
        if size in self.looks and self.looks[size].captured:
            return
        limit = ShortTimeLimit(measured=self._timed, known=self._known, least_bytes=self.least_bytes)
        try:
            with self.working(f"{self.vary.name} {size}"), short_time_limit(limit):
                found = self.profile(self.source(size))
        except (CaptureError, TargetError) as error:
            if not self.captured:
                raise
            words, larger = str(error).rstrip("."), max(self.captured)
            if size < larger:
                raise type(error)(
                    f"{self.vary.name} {size} is refused and {larger} is not: {words}. {SOME_TAKEN}"
                ) from error
            logger.warning(
                "no %s from %s on is looked at, since that one is refused: %s. %s",
                self.vary.name,
                size,
                words,
                SOME_TAKEN,
            )
            self.refused.add(size)
            return
        if self._known is None:
            self._known = found.known
        # without the model behind it, of which there would be one for each size
        self._add(size, Profile(found.step, found.known), captured=True)

    def look_at(self, size: int) -> None:
        """Make one size on paper, with the bytes inside of its ops measured; capture it where that fails."""
        if size in self.looks:
            return
        step = None if self.may_be_refused(size) else self._measured_on_paper(size)
        if step is None:
            self.capture(size)
        else:
            self._add(size, Profile(step), captured=False)

    def _add(self, size: int, profile: Profile, *, captured: bool) -> None:
        form = form_of(profile.step)
        if form not in self._forms:
            self._forms.append(form)
        self.looks[size] = Look(profile=profile, captured=captured, form=self._forms.index(form))
        self.version += 1
        self._papers.clear()
        if captured:
            self._learn_degree(size)

    def _learn_degree(self, size: int) -> None:
        """From sizes with the same ops: nobody said what a factory does with its argument."""
        for other, look in self.captured.items():
            small, large = sorted((size, other))
            if look.form == self.looks[size].form and large >= 2 * small:
                steps = {one: self.looks[one].profile.step for one in (small, large)}
                least_bytes = MOST_ERROR * self.looks[large].profile.peak_bytes
                self.degree = degree_shown(self.degree, steps, least_bytes=least_bytes)

    def _measured_on_paper(self, size: int) -> Step | None:
        captured = self.captured
        chosen = self._alike(size, captured)
        known = {one: found for one in chosen if (found := captured[one].profile.known) is not None}
        if len(known) <= self.degree or not self._is_steady(min(chosen)):
            return None
        if not self._agrees(min(captured, key=lambda one: (abs(one - size), one)), chosen):
            return None
        step = step_from(size, {one: captured[one].profile.step for one in chosen})
        key = (self.least_bytes, tuple(sorted(chosen)))
        insides = self._insides.setdefault(
            key, Insides(known, least_bytes=self.least_bytes, measure=workspace_bytes)
        )
        with self.working(f"{self.vary.name} {size}"):
            return insides.fill(step, size)

    def _is_steady(self, smallest: int) -> bool:
        """Whether all captured sizes above have the same ops: small ones may lack some."""
        form = self.looks[smallest].form
        return all(look.form == form for size, look in self.captured.items() if size > smallest)

    def _agrees(self, nearest: int, chosen: list[int]) -> bool:
        """Whether a captured size has the peak that the `chosen` ones tell, if it has other ops than they."""
        looks = self.looks
        if looks[nearest].form == looks[chosen[0]].form:
            return True
        told = self._peak_bytes(nearest, {one: looks[one] for one in chosen})
        return told is not None and abs(told / looks[nearest].profile.peak_bytes - 1) <= MOST_ERROR

    def _alike(self, size: int, looks: dict[int, Look]) -> list[int]:
        forms = {other: look.form for other, look in looks.items()}
        return sizes_alike(size, forms, degree=self.degree)

    def may_be_refused(self, size: int) -> bool:
        """Whether the model may take no size as large as that: one was refused, and it is above those
        captured."""
        return bool(self.refused) and size > max(self.captured)

    def is_apart(self, size: int) -> bool:
        """Whether a size is far enough from all captured ones to draw a line through it and them."""
        return all(abs(size - other) >= APART * max(size, other) for other in self.captured)

    def tells(self, size: int) -> bool:
        """Whether there is something to tell a size from."""
        return bool(self.told_from(size))

    def on_paper(self, size: int) -> Step | None:
        """The step at a size; None where nothing tells it."""
        if size in self.looks:
            return self.looks[size].profile.step
        if (size, self.version) not in self._papers:
            chosen = self._alike(size, self.looks)
            if not chosen:
                return None
            steps = {one: self.looks[one].profile.step for one in chosen}
            self._papers[size, self.version] = step_from(size, steps)
        return self._papers[size, self.version]

    def peak_bytes(self, size: int) -> int | None:
        """The peak of a size without a plan; None where nothing tells it."""
        return self._peak_bytes(size, self.looks)

    def _peak_bytes(self, size: int, looks: dict[int, Look]) -> int | None:
        if size in looks:
            return looks[size].profile.peak_bytes
        chosen = self._alike(size, looks)
        if not chosen:
            return None
        timelines = {one: looks[one].profile.timeline for one in chosen}
        if len({timeline.runs for timeline in timelines.values()}) == 1:
            return peak_from(size, {one: timeline.bytes_held for one, timeline in timelines.items()})
        step = step_from(size, {one: looks[one].profile.step for one in chosen})
        return Profile(step).peak_bytes

    def told_from(self, size: int) -> list[int]:
        """The sizes that one is told from, which have the same ops; itself where it was looked at."""
        return [size] if size in self.looks else self._alike(size, self.looks)

    def step_seconds(self, size: int) -> float:
        """The time of a size without a plan: on the line between the captured ones next to it, whatever their
        ops; beyond them, by two that have the same."""
        captured = self.captured
        if size in captured:
            return captured[size].profile.step_seconds
        below = [other for other in captured if other < size]
        above = [other for other in captured if other > size]
        near = [max(below), min(above)] if below and above else self._alike(size, captured)[:2]
        return seconds_by(size, near)([captured[one].profile.step_seconds for one in near])

    def floor_bytes(self, size: int) -> int | None:
        """About what no plan of a size can be below; None where nothing tells it."""
        if size in self.looks:
            return self.looks[size].profile.bounds.floor_bytes
        if len(self.looks) == 1:
            return self._guessed_floor(size)
        chosen = self._alike(size, self.looks)
        return _floor_from(size, {one: self.looks[one].profile.bounds for one in chosen}) if chosen else None

    def _guessed_floor(self, size: int) -> int:
        """The same from one size alone, and one that is guessed from it: all that grows is taken to grow as
        fast as anything may, so that too small a size is captured, and not too large a one."""
        [(only, look)] = self.looks.items()
        degree, far = self.degree, FAR * only
        if self._far is None:
            self._far = Bounds(make_table(scaled(look.profile.step, Fraction(FAR) ** degree)))
        return _floor_from(size**degree, {only**degree: look.profile.bounds, far**degree: self._far})

    @property
    def margin(self) -> float:
        """Twice the largest share by which the peak of a size that was looked at is not what smaller and
        larger ones say of it; infinite where nothing can be told, or nothing well."""
        if self._margin[0] != self.version:
            self._margin = (self.version, 2 * self._error())
        return self._margin[1]

    def _error(self) -> float:
        between = sorted(self.looks)[1:-1]
        if len(between) < self.degree:
            return inf
        errors = []
        for size in between:
            others = {other: look for other, look in self.looks.items() if other != size}
            told = self._peak_bytes(size, others)
            errors.append(inf if told is None else abs(told / self.looks[size].profile.peak_bytes - 1))
        return max(errors) if max(errors) <= MOST_ERROR else inf


def _floor_from(size: int, chosen: dict[int, Bounds]) -> int:
    ranks = sorted({rank for bounds in chosen.values() for rank in bounds.floor_ranks})
    if not ranks:
        return max(bounds.floor_bytes for bounds in chosen.values())
    return peak_from(
        size, {one: [bounds.at(rank).least_bytes for rank in ranks] for one, bounds in chosen.items()}
    )


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
