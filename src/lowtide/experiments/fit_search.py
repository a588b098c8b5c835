"""The search of a fit: which sizes are looked at for one budget, and what is told of those in between.

Two sizes are captured, of which the second is about the largest that should fit with a plan; all others are
told from them (`sizes`). How far off that is shows in sizes whose ops were asked what they hold inside: sizes
that are further than that from the budget are believed, and others looked at in turn, until one fits and the
next does not. Where paper tells nothing, sizes are captured instead.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import count
from math import inf

from lowtide.errors import CannotMoveToFreshProcess, CaptureError, FreshProcessError, TargetError
from lowtide.experiments.fit_records import Check, Fit, FitRow, Vary
from lowtide.experiments.interpolate_step import last_within, peak_from, with_ways_of
from lowtide.experiments.machine_memory import why_not
from lowtide.experiments.measured import run_plain, run_plan
from lowtide.experiments.profiled_sizes import LEAST_SHARE, Look, Probe, Sizes
from lowtide.planning.simulate import Bytes, simulate
from lowtide.profiles import Profile

FIRST = 8
"""What is captured and timed first, in multiples of the size's unit. Ops of smaller steps take more time for
each sample, so that little can be told from them."""
MOST_FIRST = 4
"""So many are captured until two have the same ops."""
NUM_BETWEEN = 4
"""Sizes between the largest without and the largest with a plan that are told of."""
TOO_SMALL = "this machine is too small: it"
"""The beginning of why a size was not run, or not compared with eager."""
NEAR = 0.02
"""Of sizes that differ by this share at most, the lowest plan of one is taken for that of the other."""


@dataclass(slots=True, kw_only=True)
class Search:
    """What a budget asks of the sizes."""

    sizes: Sizes
    budget_bytes: int
    _probes: dict[int, tuple[Look, Probe]] = field(default_factory=dict)
    _papers: dict[int, tuple[int, Probe]] = field(default_factory=dict)
    """sizes that were planned without having been looked at, with the forms of their steps"""
    _held: dict[tuple[int, int, int], Bytes] = field(default_factory=dict)

    @property
    def vary(self) -> Vary:
        return self.sizes.vary

    @property
    def most(self) -> int:
        return self.sizes.most

    def answer(self, *, check: bool) -> Fit:
        self.sizes.least_bytes = self.budget_bytes // LEAST_SHARE
        self.begin()
        largest_plain = self.largest_plain(captured=check)
        largest = self.largest_with_a_plan(largest_plain, captured=check)
        smallest = self.sizes.looks[min(self.sizes.looks)].profile
        return Fit(
            budget_bytes=self.budget_bytes,
            vary=self.vary.name,
            unit=self.vary.unit,
            multiple_of=self.vary.multiple_of,
            most=self.most,
            largest_plain=largest_plain,
            largest=largest,
            no_plan_above=self.no_plan_above(largest),
            lowest_bytes=smallest.floor_bound_bytes or smallest.step.static_bytes,
            rows=tuple(self.rows(largest_plain, largest)),
            checks=tuple(self.checks(largest_plain, largest)) if check else (),
        )

    def probe(self, size: int) -> Probe:
        """A size that was looked at."""
        look = self.sizes.looks[size]
        if size not in self._probes or self._probes[size][0] is not look:
            self._probes[size] = look, Probe(profile=look.profile, budget_bytes=self.budget_bytes)
        return self._probes[size][1]

    def begin(self) -> None:
        """Capture sizes to tell others from."""
        unit, sizes = self.vary.multiple_of, self.sizes
        beyond = self.most + unit
        if not sizes.looks:
            self._capture_first(min(FIRST * unit, self.most))
        while (
            not (sizes.tells(beyond) and len(sizes.captured) > sizes.degree)
            and len(sizes.captured) < MOST_FIRST
            and self.most not in sizes.captured
        ):
            sizes.capture(self._next_to_capture())
        if self.sizes.degree > 1 and len(sizes.captured) <= MOST_FIRST:
            self._capture_large(beyond)

    def _capture_large(self, beyond: int) -> None:
        """About the largest size that should fit with a plan, where that is not near to those captured."""
        if len(self.sizes.told_from(beyond)) <= self.sizes.degree:
            return
        guess = self._guess(0, beyond, self._proven_bytes)
        if guess and self.sizes.is_apart(guess):
            self.sizes.capture(guess)

    def _capture_first(self, size: int) -> None:
        """Where a size is refused, as images may be that are too small for a model, a larger one is tried."""
        try:
            self.sizes.capture(size)
        except (CaptureError, TargetError):
            if size == self.most:
                raise
            with suppress(CaptureError, TargetError):
                self.sizes.capture(min(2 * size, self.most))
            if not self.sizes.looks:
                raise

    def _next_to_capture(self) -> int:
        """About the largest size that should fit with a plan; where that is captured, one next to it; where
        it is refused, one half-way."""
        unit, captured = self.vary.multiple_of, self.sizes.captured
        if self.sizes.refused:
            return -(-(max(captured) + self.most) // 2 // unit) * unit
        guess = self._guess(0, self.most + unit, self.lowest_bytes)
        largest = max(captured)
        twice = min(2 * largest, self.most)
        more = [twice] if self._is_half_full(captured[largest].profile) else []
        for size in (guess or 0, *more, largest // 2 // unit * unit, 3 * largest // 4 // unit * unit):
            if min(captured) < size and self.sizes.is_apart(size):
                return size
        return twice

    def _is_half_full(self, profile: Profile) -> bool:
        """Whether a size leaves half of the budget, or more, as it may where its guess took all bytes to grow
        as fast as some do."""
        static_bytes = profile.step.static_bytes
        return 2 * (profile.bounds.floor_bytes - static_bytes) <= self.budget_bytes - static_bytes

    def largest(
        self,
        fits: Callable[[Probe], bool],
        needed: Callable[[int], float | None],
        on_paper: Callable[[int], bool | None],
        *,
        low: int = 0,
    ) -> int:
        """The largest size that `fits`, while the next does not; `low`, which is known to fit, or larger.

        `needed`: about how many bytes a size needs, None where nobody can tell. Every fourth size is chosen
        without it, so that wrong guesses cost a few times the captures of halving at most. `on_paper`: does a
        size fit? None where it has to be looked at.
        """
        unit, most, looks, refused = self.vary.multiple_of, self.most, self.sizes.looks, self.sizes.refused
        high = most + unit
        low = max([low, *(size for size in looks if self.probe(size).fits_plain)])
        for turn in count():
            if high - low == unit:
                return low
            is_open = high > most and high not in refused
            middle = min(2 * low, most) if is_open else (low + high) // 2 // unit * unit
            guess = self._guess(low, high, needed) if turn % 4 < 3 and high not in refused else None
            size = max(low + unit, middle if guess is None else guess)
            does_fit = None if size in looks or self.sizes.may_be_refused(size) else on_paper(size)
            if does_fit is None:
                self.sizes.look_at(size)
                does_fit = size in looks and fits(self.probe(size))
            low, high = (size, high) if does_fit else (low, size)
        raise AssertionError

    def largest_plain(self, *, captured: bool) -> int:
        """As `largest`. It is `captured`, if asked: paper does not know whether the model takes it."""
        while True:
            size = self.largest(lambda probe: probe.fits_plain, self.sizes.peak_bytes, self.plain_on_paper)
            if not size or not captured or size in self.sizes.captured:
                return size
            self.sizes.capture(size)

    def largest_with_a_plan(self, largest_plain: int, *, captured: bool) -> int:
        """As `largest`. Where it is larger than without a plan, it is looked at; and `captured`, if asked."""
        while True:
            size = self.largest(
                lambda probe: probe.fits, self.lowest_bytes, self.with_a_plan_on_paper, low=largest_plain
            )
            if size == largest_plain:
                return size
            if size not in self.sizes.looks:
                self.sizes.look_at(size)
            elif captured and not self.sizes.looks[size].captured:
                self.sizes.capture(size)
            else:
                return size

    def no_plan_above(self, largest: int) -> int | None:
        """The largest size for which it is not proven that no plan exists; None where nobody can tell."""
        unit, beyond = self.vary.multiple_of, self.most + self.vary.multiple_of
        if largest == self.most or not self.sizes.tells(beyond):
            return None
        guess = self._guess(largest, beyond, self.sizes.floor_bytes)
        first = [] if guess is None else [size for size in (guess, guess + unit) if size <= self.most]
        return last_within(
            self.budget_bytes,
            self._proven_bytes,
            low=largest,
            high=beyond,
            unit=unit,
            most=self.most,
            first=first,
        )

    def _proven_bytes(self, size: int) -> int | None:
        """What no plan of a size can be below."""
        step = self.sizes.on_paper(size)
        return None if step is None else Profile(step).floor_bound_bytes

    def _guess(self, low: int, high: int, needed: Callable[[int], float | None]) -> int | None:
        """The largest size from `low` to below `high` that seems to fit."""
        return last_within(
            self.budget_bytes,
            needed,
            low=low,
            high=high,
            unit=self.vary.multiple_of,
            most=self.most,
            first=sorted(self.sizes.looks),
        )

    def lowest_bytes(self, size: int) -> int | None:
        """What a size needs by the lowest plan of another one; where none was planned, what it is proven to
        need at least."""
        reached = self._reached(size, self._planned())
        return self.sizes.floor_bytes(size) if reached is None else reached

    def _reached(self, size: int, planned: Iterable[int]) -> int | None:
        """What a size needs by the lowest plans of others; None where those tell nothing."""
        told = (self._reached_by(other, size) for other in planned)
        return min((nbytes for nbytes in told if nbytes is not None), default=None)

    def _reached_by(self, other: int, size: int) -> int | None:
        """What a size needs by the lowest plan of another one; told by the line through two sizes."""
        here = self.sizes.told_from(size)
        if not here or self.sizes.looks[here[0]].form != self._planned()[other][0]:
            return None
        return peak_from(size, {one: self._held_by(other, one) for one in here})

    def _held_by(self, other: int, size: int) -> Bytes:
        key = (other, size, self.sizes.version)
        if key not in self._held:
            (_, probe), step = self._planned()[other], self.sizes.looks[size].profile.step
            step = with_ways_of(step, probe.profile.step, Fraction(size, other))
            self._held[key] = simulate(step, probe.lowest_runs).bytes_held
        return self._held[key]

    def _planned(self) -> dict[int, tuple[int, Probe]]:
        """Sizes whose plans were searched for, and the forms of the steps that these are for."""
        known = self._papers | {size: (look.form, probe) for size, (look, probe) in self._probes.items()}
        return {size: (form, probe) for size, (form, probe) in known.items() if probe.is_searched}

    def plain_on_paper(self, size: int) -> bool | None:
        """Whether a size fits without a plan; None where it is too near to the budget to tell."""
        nbytes, margin = self.sizes.peak_bytes(size), self.sizes.margin
        if nbytes is None or margin == inf or abs(nbytes - self.budget_bytes) <= margin * self.budget_bytes:
            return None
        return nbytes < self.budget_bytes

    def with_a_plan_on_paper(self, size: int) -> bool | None:
        """Whether a size fits with the lowest plan of one near to it, or one that was made on paper; None
        where paper is far off."""
        if not self.sizes.tells(size) or self.sizes.margin == inf:
            return None
        planned = self._planned()
        reached = self._reached(size, planned)
        if reached is not None and reached <= self.budget_bytes:
            return True
        near = [other for other in planned if abs(other - size) <= NEAR * size]
        if self._reached(size, near) is not None:
            return False
        if size not in self._papers:
            step = self.sizes.on_paper(size)
            assert step is not None
            form = self.sizes.looks[self.sizes.told_from(size)[0]].form
            self._papers[size] = form, Probe(profile=Profile(step), budget_bytes=self.budget_bytes)
        return self._papers[size][1].fits

    def rows(self, largest_plain: int, largest: int) -> list[FitRow]:
        """All sizes that were looked at and fit without a plan, the largest ones, and some in between."""
        unit, looks = self.vary.multiple_of, self.sizes.looks
        gap = (largest - largest_plain) // unit
        between = {largest_plain + gap * i // (NUM_BETWEEN + 1) * unit for i in range(1, NUM_BETWEEN + 1)}
        plain = {size for size in looks if self.probe(size).fits_plain}
        chosen = (plain | between | {largest_plain, largest}) - {0}
        return [
            self._row(size, largest, planned=size > largest_plain)
            for size in sorted(chosen)
            if self.sizes.tells(size)
        ]

    def _row(self, size: int, largest: int, *, planned: bool) -> FitRow:
        plain_peak_bytes, seconds = self.sizes.peak_bytes(size), self.sizes.step_seconds(size)
        assert plain_peak_bytes is not None
        peak_bytes, recompute = plain_peak_bytes, 0.0
        if planned and plain_peak_bytes > self.budget_bytes:
            probe = self.probe(largest)
            assert probe.plan is not None
            if size == largest:
                peak_bytes = probe.plan.peak_bytes
                recompute = seconds * _share(probe.plan.recompute_seconds, probe.profile.step_seconds)
            else:
                peak_bytes = self.budget_bytes
                recompute = seconds * self._overhead(plain_peak_bytes, probe)
        look = self.sizes.looks.get(size)
        return FitRow(
            size=size,
            plain_peak_bytes=plain_peak_bytes,
            peak_bytes=peak_bytes,
            step_seconds=seconds,
            recompute_seconds=recompute,
            per_second=self.vary.amount(size) / (seconds + recompute) if seconds else None,
            profiled=look is not None and look.captured,
        )

    def _overhead(self, peak_bytes: int, largest: Probe) -> float:
        """The share of time that a plan adds at a size of this peak: as at the `largest` one within the
        same share of what it holds besides what is always there."""
        static_bytes = largest.profile.step.static_bytes
        share = (self.budget_bytes - static_bytes) / max(1, peak_bytes - static_bytes)
        budget_bytes = static_bytes + int(share * (largest.profile.peak_bytes - static_bytes))
        plan = largest.profile.plan(max(self.budget_bytes, budget_bytes))
        return _share(plan.recompute_seconds, largest.profile.step_seconds)

    def checks(self, largest_plain: int, largest: int) -> Sequence[Check]:
        """Run the largest size with its plan, and the first that does not fit without."""
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
        step, peak_bytes = self.sizes.on_paper(size), self.sizes.peak_bytes(size)
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
        plan = self.probe(size).plan
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


def _share(seconds: float, whole: float) -> float:
    return seconds / whole if whole else 0.0
