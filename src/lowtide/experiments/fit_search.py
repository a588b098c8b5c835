"""The search of a fit: which sizes to profile for one budget, and the rows of sizes in between.

Two sizes are captured; the second is about the largest that should fit with a plan. All others are
interpolated from them (`profiled_sizes`). Sizes with measured workspaces show the error of interpolation. A
size further from the budget than this error counts as interpolated. Other sizes are profiled in turn, until
one fits and the next does not. Where interpolation is impossible, sizes are captured.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import count
from math import inf

from lowtide.errors import CannotMoveToFreshProcess, CaptureError, FreshProcessError, TargetError
from lowtide.experiments.fit import Check, Fit, FitRow, Vary
from lowtide.experiments.interpolate import interpolate_peak, last_within, with_remats_of
from lowtide.experiments.machine import why_not
from lowtide.experiments.measured import run_plain, run_plan
from lowtide.experiments.profiled_sizes import LEAST_SHARE, ProfiledSize, ProfiledSizes, SizeInBudget
from lowtide.planning.simulate import Bytes, simulate
from lowtide.profiles import Profile

FIRST = 8
"""The size that is captured and timed first, in multiples of the size's unit. Ops of smaller steps take more
time per sample, so their times do not scale."""
MOST_FIRST = 4
"""The most sizes to capture until two have the same ops."""
NUM_BETWEEN = 4
"""Rows between the largest size without a plan and the largest with one."""
TOO_SMALL = "this machine is too small: it"
"""The start of the reason why a size was not run, or not compared with eager."""
NEAR = 0.02
"""The lowest plan of a size serves sizes that differ by at most this share."""


@dataclass(slots=True, kw_only=True)
class Search:
    """The search for one budget among the sizes."""

    sizes: ProfiledSizes
    budget_bytes: int
    _in_budget: dict[ProfiledSize, SizeInBudget] = field(default_factory=dict)
    _interpolated: dict[int, tuple[int, SizeInBudget]] = field(default_factory=dict)
    """sizes that were planned and not profiled, with the forms of their steps"""
    _live: dict[tuple[SizeInBudget, ProfiledSize], Bytes] = field(default_factory=dict)

    @property
    def vary(self) -> Vary:
        return self.sizes.vary

    @property
    def most(self) -> int:
        return self.sizes.most

    @property
    def beyond(self) -> int:
        return self.most + self.vary.multiple_of

    def answer(self, *, check: bool) -> Fit:
        self.sizes.least_bytes = self.budget_bytes // LEAST_SHARE
        self._capture_some()
        largest_plain = self._largest_plain(captured=check)
        largest = self._largest_with_plan(largest_plain, captured=check)
        smallest = self.sizes.profiled[min(self.sizes.profiled)].profile
        return Fit(
            budget_bytes=self.budget_bytes,
            vary=self.vary.name,
            unit=self.vary.unit,
            multiple_of=self.vary.multiple_of,
            most=self.most,
            largest_plain=largest_plain,
            largest=largest,
            no_plan_above=self._no_plan_above(largest),
            lowest_bytes=smallest.floor_bound_bytes or smallest.step.static_bytes,
            rows=tuple(self._rows(largest_plain, largest)),
            checks=tuple(self._checks(largest_plain, largest)) if check else (),
        )

    def _at(self, size: int) -> SizeInBudget:
        """A profiled size."""
        found = self.sizes.profiled[size]
        if found not in self._in_budget:
            self._in_budget[found] = SizeInBudget(profile=found.profile, budget_bytes=self.budget_bytes)
        return self._in_budget[found]

    def _capture_some(self) -> None:
        """Capture sizes to interpolate others from."""
        sizes = self.sizes
        if not sizes.profiled:
            self._capture_first(min(FIRST * self.vary.multiple_of, self.most))
        while (
            not (sizes.neighbours(self.beyond) and len(sizes.captured) > sizes.degree)
            and len(sizes.captured) < MOST_FIRST
            and self.most not in sizes.captured
        ):
            sizes.capture(self._next_to_capture())
        if sizes.degree > 1 and len(sizes.captured) <= MOST_FIRST:
            if len(sizes.neighbours(self.beyond)) <= sizes.degree:
                return
            guess = self._last_within(self._proven_bytes)
            if guess and sizes.is_apart(guess):
                sizes.capture(guess)

    def _capture_first(self, size: int) -> None:
        """Try a larger size where the model refuses one, such as too small an image."""
        try:
            self.sizes.capture(size)
        except (CaptureError, TargetError):
            if size == self.most:
                raise
            with suppress(CaptureError, TargetError):
                self.sizes.capture(min(2 * size, self.most))
            if not self.sizes.profiled:
                raise

    def _next_to_capture(self) -> int:
        """About the largest size that should fit with a plan; where that is captured, one next to it; where
        it is refused, one half-way."""
        unit, captured = self.vary.multiple_of, self.sizes.captured
        if self.sizes.refused:
            return -(-(max(captured) + self.most) // 2 // unit) * unit
        guess = self._last_within(self._lowest_bytes)
        largest = max(captured)
        twice = min(2 * largest, self.most)
        # the guess may be too small: it lets all bytes grow as fast as the fastest
        profile = captured[largest].profile
        static_bytes = profile.step.static_bytes
        half_full = 2 * (profile.bounds.floor_bytes - static_bytes) <= self.budget_bytes - static_bytes
        more = [twice] if half_full else []
        for size in (guess or 0, *more, largest // 2 // unit * unit, 3 * largest // 4 // unit * unit):
            if min(captured) < size and self.sizes.is_apart(size):
                return size
        return twice

    def _largest(
        self,
        fits: Callable[[SizeInBudget], bool],
        needed: Callable[[int], float | None],
        fits_interpolated: Callable[[int], bool | None],
        *,
        low: int = 0,
    ) -> int:
        """The largest size that `fits`, while the next does not; at least `low`, which is known to fit.

        `needed`: about the bytes that a size needs, None where unknown. Every fourth size is chosen by
        bisection, so wrong guesses cost at most a few times the captures of bisection. `fits_interpolated`:
        None where a size has to be profiled to know.
        """
        unit, most, high = self.vary.multiple_of, self.most, self.beyond
        profiled, refused = self.sizes.profiled, self.sizes.refused
        low = max([low, *(size for size in profiled if self._at(size).fits_plain)])
        for turn in count():
            if high - low == unit:
                return low
            is_open = high > most and high not in refused
            middle = min(2 * low, most) if is_open else (low + high) // 2 // unit * unit
            use_guess = turn % 4 < 3 and high not in refused
            guess = self._last_within(needed, low=low, high=high) if use_guess else None
            size = max(low + unit, middle if guess is None else guess)
            is_known = size in profiled or self.sizes.may_be_refused(size)
            does_fit = None if is_known else fits_interpolated(size)
            if does_fit is None:
                self.sizes.profile(size)
                does_fit = size in profiled and fits(self._at(size))
            low, high = (size, high) if does_fit else (low, size)
        raise AssertionError

    def _largest_plain(self, *, captured: bool) -> int:
        """Without a plan. With `captured`, the size is captured: an interpolated one may be refused."""
        while True:
            size = self._largest(
                lambda one: one.fits_plain, self.sizes.peak_bytes, self._fits_plain_interpolated
            )
            if not size or not captured or size in self.sizes.captured:
                return size
            self.sizes.capture(size)

    def _largest_with_plan(self, largest_plain: int, *, captured: bool) -> int:
        """Where it is larger than without a plan, the size is profiled; with `captured`, it is captured."""
        while True:
            size = self._largest(
                lambda one: one.fits, self._lowest_bytes, self._fits_planned_interpolated, low=largest_plain
            )
            if size == largest_plain:
                return size
            if size not in self.sizes.profiled:
                self.sizes.profile(size)
            elif captured and size not in self.sizes.captured:
                self.sizes.capture(size)
            else:
                return size

    def _no_plan_above(self, largest: int) -> int | None:
        """The largest size for which it is not proven that no plan exists; None where that is unknown."""
        if largest == self.most or not self.sizes.neighbours(self.beyond):
            return None
        guess = self._last_within(self.sizes.floor_bytes, low=largest)
        first = [] if guess is None else [guess, guess + self.vary.multiple_of]
        first = [size for size in first if size <= self.most]
        return self._last_within(self._proven_bytes, low=largest, first=first)

    def _last_within(
        self,
        needed: Callable[[int], float | None],
        *,
        low: int = 0,
        high: int | None = None,
        first: Sequence[int] | None = None,
    ) -> int | None:
        """The largest size from `low` to below `high` that needs at most the budget."""
        return last_within(
            self.budget_bytes,
            needed,
            low=low,
            high=self.beyond if high is None else high,
            unit=self.vary.multiple_of,
            most=self.most,
            first=sorted(self.sizes.profiled) if first is None else first,
        )

    def _proven_bytes(self, size: int) -> int | None:
        """A proven lower bound of the peak of any plan of a size."""
        step = self.sizes.step_at(size)
        return None if step is None else Profile(step).floor_bound_bytes

    def _lowest_bytes(self, size: int) -> int | None:
        """The peak of a size by the lowest plan of another one; where none was planned, a lower bound."""
        reached = self._reached_bytes(size, self._planned())
        return self.sizes.floor_bytes(size) if reached is None else reached

    def _reached_bytes(self, size: int, planned: Iterable[int]) -> int | None:
        """The lowest peak of a size by the lowest plans of others; None where none applies to its ops."""
        peaks = (self._reached_by(other, size) for other in planned)
        return min((nbytes for nbytes in peaks if nbytes is not None), default=None)

    def _reached_by(self, other: int, size: int) -> int | None:
        here = self.sizes.neighbours(size)
        if not here or self.sizes.profiled[here[0]].form != self._planned()[other][0]:
            return None
        return interpolate_peak(size, {one: self._live_by(other, one) for one in here})

    def _live_by(self, other: int, size: int) -> Bytes:
        """Live bytes of a profiled size over the schedule of the lowest plan of another one."""
        (_, planned), profiled = self._planned()[other], self.sizes.profiled[size]
        key = (planned, profiled)
        if key not in self._live:
            step = with_remats_of(profiled.profile.step, planned.profile.step, Fraction(size, other))
            self._live[key] = simulate(step, planned.lowest_runs).live_bytes
        return self._live[key]

    def _planned(self) -> dict[int, tuple[int, SizeInBudget]]:
        """Sizes whose plans were searched for, with the forms of their steps."""
        planned = self._interpolated | {
            size: (found.form, self._in_budget[found])
            for size, found in self.sizes.profiled.items()
            if found in self._in_budget
        }
        return {size: (form, one) for size, (form, one) in planned.items() if one.is_searched}

    def _fits_plain_interpolated(self, size: int) -> bool | None:
        """Whether a size fits without a plan; None where it is too near to the budget to know."""
        nbytes, margin = self.sizes.peak_bytes(size), self.sizes.margin
        if nbytes is None or margin == inf or abs(nbytes - self.budget_bytes) <= margin * self.budget_bytes:
            return None
        return nbytes < self.budget_bytes

    def _fits_planned_interpolated(self, size: int) -> bool | None:
        """Whether a size fits with the lowest plan of a size near it, or with a plan of its interpolated
        step; None where interpolation is far off."""
        here = self.sizes.neighbours(size)
        if not here or self.sizes.margin == inf:
            return None
        planned = self._planned()
        reached = self._reached_bytes(size, planned)
        if reached is not None and reached <= self.budget_bytes:
            return True
        near = [other for other in planned if abs(other - size) <= NEAR * size]
        if self._reached_bytes(size, near) is not None:
            return False
        if size not in self._interpolated:
            step = self.sizes.step_at(size)
            assert step is not None
            planned_size = SizeInBudget(profile=Profile(step), budget_bytes=self.budget_bytes)
            self._interpolated[size] = self.sizes.profiled[here[0]].form, planned_size
        return self._interpolated[size][1].fits

    def _rows(self, largest_plain: int, largest: int) -> list[FitRow]:
        """All profiled sizes that fit without a plan, the largest ones, and some in between."""
        unit = self.vary.multiple_of
        gap = (largest - largest_plain) // unit
        between = {largest_plain + gap * i // (NUM_BETWEEN + 1) * unit for i in range(1, NUM_BETWEEN + 1)}
        plain = {size for size in self.sizes.profiled if self._at(size).fits_plain}
        chosen = (plain | between | {largest_plain, largest}) - {0}
        return [
            self._row(size, largest, planned=size > largest_plain)
            for size in sorted(chosen)
            if self.sizes.neighbours(size)
        ]

    def _row(self, size: int, largest: int, *, planned: bool) -> FitRow:
        plain_peak_bytes, seconds = self.sizes.peak_bytes(size), self.sizes.step_seconds(size)
        assert plain_peak_bytes is not None
        peak_bytes, overhead = plain_peak_bytes, 0.0
        if planned and plain_peak_bytes > self.budget_bytes:
            peak_bytes, overhead = self._planned_row(size, largest, plain_peak_bytes)
        recompute = seconds * overhead
        return FitRow(
            size=size,
            plain_peak_bytes=plain_peak_bytes,
            peak_bytes=peak_bytes,
            step_seconds=seconds,
            recompute_seconds=recompute,
            per_second=self.vary.amount(size) / (seconds + recompute) if seconds else None,
            profiled=size in self.sizes.captured,
        )

    def _planned_row(self, size: int, largest: int, peak_bytes: int) -> tuple[int, float]:
        """The peak with a plan, and the share of time that the plan adds.

        At a smaller size than the largest, that is the share at the largest one within the same part of its
        live bytes besides static ones.
        """
        planned = self._at(largest)
        assert planned.plan is not None
        plan, peak, profile = planned.plan, planned.plan.peak_bytes, planned.profile
        if size != largest:
            static_bytes = profile.step.static_bytes
            share = (self.budget_bytes - static_bytes) / max(1, peak_bytes - static_bytes)
            budget_bytes = static_bytes + int(share * (profile.peak_bytes - static_bytes))
            plan, peak = profile.plan(max(self.budget_bytes, budget_bytes)), self.budget_bytes
        return peak, plan.recompute_seconds / profile.step_seconds if profile.step_seconds else 0.0

    def _checks(self, largest_plain: int, largest: int) -> Sequence[Check]:
        """Run the largest size with its plan, and the first size that does not fit without a plan."""
        found, working = [], self.sizes.working
        above = largest_plain + self.vary.multiple_of
        if above <= self.most:
            with working(f"measuring {self.vary.name} {above} without a plan"):
                found.append(self._check_plain(above))
        if largest > largest_plain:
            with working(f"measuring {self.vary.name} {largest} with its plan"):
                found.append(self._check_plan(largest))
        return found

    def _check_plain(self, size: int) -> Check:
        step, peak_bytes = self.sizes.step_at(size), self.sizes.peak_bytes(size)
        assert step is not None and peak_bytes is not None
        predicted = Check(size=size, planned=False, predicted_peak_bytes=peak_bytes)
        reason = why_not(step, peak_bytes=peak_bytes)
        if reason:
            return replace(predicted, reason=f"{TOO_SMALL} {reason}")
        try:
            found = run_plain(self.sizes.source(size), predicted=peak_bytes, timed_runs=0)
        except (TargetError, FreshProcessError) as error:
            return replace(predicted, reason=str(error))
        return replace(predicted, measured_peak_bytes=found.measured_peak_bytes)

    def _check_plan(self, size: int) -> Check:
        plan = self._at(size).plan
        assert plan is not None
        predicted = Check(size=size, planned=True, predicted_peak_bytes=plan.peak_bytes)
        try:
            outcome = run_plan(self.sizes.source(size), plan, timed_runs=0, resident=False)
        except CannotMoveToFreshProcess as error:
            return replace(predicted, reason=str(error))
        return replace(
            predicted,
            measured_peak_bytes=outcome.measurement.planned.measured_peak_bytes,
            exact=outcome.measurement.exact,
            differences=outcome.measurement.differences,
            reason=f"{TOO_SMALL} {outcome.reason}" if outcome.reason else "",
        )
