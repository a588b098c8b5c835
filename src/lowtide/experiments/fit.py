"""How large a batch fits into a budget, without and with a plan, and which size is the fastest.

No step is run to find out. Two small sizes are captured and profiled; from them a step of any size is made
on paper (`between`), and of the largest that should fit with a plan, the bytes inside of its ops are measured
(`inside`). It shows how far off paper is, and sizes that are further than that from the budget are told from
those around them; others are looked at in turn, until one fits and the next does not. Where paper tells
nothing, sizes are captured instead. What was found can then be measured: the size is captured for that.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Any

from lowtide import api
from lowtide.experiments.between import is_steady, sizes_alike, step_at
from lowtide.experiments.fit_records import MOST, Check, Fit, FitRow, Vary, budget_bytes_of
from lowtide.experiments.guess import last_within
from lowtide.experiments.inside import Insides
from lowtide.experiments.machine import why_not
from lowtide.experiments.measured import run_plain, run_plan
from lowtide.experiments.probe import Probe, bounds_of
from lowtide.facts import Step
from lowtide.profiles import Profile
from lowtide.profiling.costing import measure_insides
from lowtide.profiling.ops import in_a_hurry
from lowtide.torchside.calls import OpCost
from lowtide.zoo.targets import Target, TargetSpec, call_factory

__all__ = ["MOST", "Check", "Fit", "FitRow", "Source", "Vary", "find_fit", "fit"]

FIRST = (8, 16)
"""What is captured first, in multiples of the size's unit. Smaller steps lack some ways to save memory, which
pay for large values alone, so that nothing can be told from them."""
MOST_FIRST = 4
"""So many are captured, each twice as large as the last, until two have the same ops."""
MOST_ERROR = 0.01
"""Paper that is further off than this share tells nothing."""
LEAST_SHARE = 100
"""What an op should hold inside, as a part of the budget, to be asked what it does."""
NUM_BETWEEN = 4
"""Sizes between the largest without and the largest with a plan that are planned on paper."""

Source = TargetSpec | Target
Profiler = Callable[[Source], Profile]
Working = Callable[[str], AbstractContextManager[None]]


def fit(
    factory: Callable[[int], Any],
    *,
    budget: str | int,
    multiple_of: int = 1,
    most: int = MOST,
    check: bool = True,
    seed: int = 0,
) -> Fit:
    """The largest batch size that fits into `budget`, without and with a plan, and the fastest one.

    `factory(batch_size)` returns `(model, batch)`, `(model, batch, optimizer)` or `(model, batch, optimizer,
    loss)`; whatever its argument makes larger is what grows. Sizes are captured and profiled, not run, and
    predicted: the largest size fits, and the next does not. It is taken for granted that a larger size needs
    more memory. With `check`, the largest size with its plan, and the first one that does not fit without,
    are then trained for a few steps, if this machine can hold them. Only multiples of `multiple_of` up to
    `most` are looked at.
    """
    return find_fit(
        lambda size: call_factory(factory, _name(factory), batch_size=size, seed=seed),
        budget=budget,
        vary=Vary(multiple_of=multiple_of, most=most),
        check=check,
    )


def find_fit(
    source: Callable[[int], Source],
    *,
    budget: str | int,
    vary: Vary,
    check: bool = True,
    profile: Profiler | None = None,
    working: Working = lambda _: nullcontext(),
) -> Fit:
    """`fit` for anything that can be profiled at a size. `working` is told what takes long."""
    search = _Search(
        source=source,
        budget_bytes=budget_bytes_of(budget),
        vary=vary,
        profile=profile or _profile,
        working=working,
    )
    search.begin()
    largest_plain = search.largest(lambda probe: probe.fits_plain, search.plain_bytes, search.plain_on_paper)
    largest = search.largest_with_a_plan(largest_plain, captured=check)
    rows = search.rows(largest_plain, largest)
    return Fit(
        budget_bytes=search.budget_bytes,
        vary=vary.name,
        unit=vary.unit,
        multiple_of=vary.multiple_of,
        most=search.most,
        largest_plain=largest_plain,
        largest=largest,
        lowest_bytes=search.probes[min(search.probes)].bounds.floor_bytes,
        rows=tuple(rows),
        checks=tuple(search.checks(largest_plain, largest)) if check else (),
    )


@dataclass(slots=True, kw_only=True)
class _Search:
    source: Callable[[int], Source]
    budget_bytes: int
    vary: Vary
    profile: Profiler
    working: Working
    probes: dict[int, Probe] = field(default_factory=dict)
    papers: dict[int, Probe] = field(default_factory=dict)
    """sizes that were planned without having been captured"""
    _measured: dict[str, OpCost] = field(default_factory=dict)
    """of ops that are the same at all sizes, too"""
    _num_added: int = 0
    """how often something new was learnt: what was told before is told anew then"""
    _margin: tuple[int, float] = (0, inf)
    _insides: dict[tuple[int, ...], Insides] = field(default_factory=dict)
    _floors: dict[tuple[int, int], int | None] = field(default_factory=dict)

    @property
    def most(self) -> int:
        return self.vary.most // self.vary.multiple_of * self.vary.multiple_of

    def look_at(self, size: int) -> None:
        """Make one size on paper, with the bytes inside of its ops measured; capture it where that fails."""
        if size in self.probes:
            return
        step = self._measured_on_paper(size)
        if step is None:
            self.capture(size)
        else:
            self._add(size, Profile(step), captured=False)

    def _add(self, size: int, profile: Profile, *, captured: bool) -> None:
        self.probes[size] = Probe(profile=profile, budget_bytes=self.budget_bytes, captured=captured)
        self._num_added += 1

    def capture(self, size: int) -> None:
        """Capture and profile one size."""
        if size in self.probes and self.probes[size].captured:
            return
        with self.working(f"{self.vary.name} {size}"), in_a_hurry(self._measured):
            found = self.profile(self.source(size))
        # without the model behind it, of which there would be one for each size
        self._add(size, Profile(found.step, found.known), captured=True)

    def begin(self) -> None:
        """Look at sizes to tell others from."""
        unit = self.vary.multiple_of
        for size in FIRST:
            self.capture(min(size * unit, self.most))
        beyond = self.most + unit
        while (
            self._on_paper(beyond) is None and len(self.probes) < MOST_FIRST and self.most not in self.probes
        ):
            self.capture(min(2 * max(self.probes), self.most))
        guess = self._guess(0, beyond, self.lowest_bytes)
        if guess:
            self.look_at(guess)

    def _measured_on_paper(self, size: int) -> Step | None:
        captured = {other: probe.profile for other, probe in self.probes.items() if probe.captured}
        steps = {other: profile.step for other, profile in captured.items()}
        chosen = tuple(sorted(sizes_alike(size, steps, degree=self.vary.degree)))
        known = {other: found for other in chosen if (found := captured[other].known) is not None}
        if len(known) <= self.vary.degree or not is_steady(chosen, steps):
            return None
        step = step_at(size, {other: steps[other] for other in chosen}, degree=self.vary.degree)
        assert step is not None
        least_bytes = self.budget_bytes // LEAST_SHARE
        insides = self._insides.setdefault(
            chosen, Insides(known, least_bytes=least_bytes, measure=measure_insides)
        )
        with self.working(f"{self.vary.name} {size}"):
            return insides.fill(step, size)

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
        size fit? None where it has to be captured.
        """
        unit, most = self.vary.multiple_of, self.most
        high = most + unit
        low = max([low, *(size for size, probe in self.probes.items() if probe.fits_plain)])
        for turn in count():
            if high - low == unit:
                return low
            middle = min(2 * low, most) if high > most else (low + high) // 2 // unit * unit
            guess = self._guess(low, high, needed) if turn % 4 < 3 else None
            size = max(low + unit, middle if guess is None else guess)
            does_fit = None if size in self.probes else on_paper(size)
            if does_fit is None:
                self.look_at(size)
                does_fit = fits(self.probes[size])
            low, high = (size, high) if does_fit else (low, size)
        raise AssertionError

    def largest_with_a_plan(self, largest_plain: int, *, captured: bool) -> int:
        """As `largest`. Where it is larger than without a plan, it is looked at; and `captured`, if asked."""
        while True:
            size = self.largest(
                lambda probe: probe.fits, self.lowest_bytes, self.with_a_plan_on_paper, low=largest_plain
            )
            if size == largest_plain:
                return size
            if size not in self.probes:
                self.look_at(size)
            elif captured and not self.probes[size].captured:
                self.capture(size)
            else:
                return size

    def _guess(self, low: int, high: int, needed: Callable[[int], float | None]) -> int | None:
        """The largest size from `low` to below `high` that seems to fit."""
        return last_within(
            self.budget_bytes,
            needed,
            low=low,
            high=high,
            unit=self.vary.multiple_of,
            most=self.most,
            first=sorted(self.probes),
        )

    def plain_bytes(self, size: int) -> float | None:
        step = self._on_paper(size)
        return None if step is None else Profile(step).peak_bytes

    def lowest_bytes(self, size: int) -> float | None:
        """What no plan can be below, as many times as for the next size that was planned."""
        floor_bytes = self._floor_on_paper(size)
        if floor_bytes is None:
            return None
        ratios = {other: probe.floor_ratio for other, probe in self.probes.items() if probe.floor_ratio > 1}
        ratios |= {other: paper.floor_ratio for other, paper in self.papers.items() if paper.floor_ratio > 1}
        near = min(ratios, key=lambda other: (abs(other - size), other), default=None)
        return floor_bytes * (1.0 if near is None else ratios[near])

    def _floor_on_paper(self, size: int) -> int | None:
        if size in self.probes:
            return self.probes[size].bounds.floor_bytes
        key = (size, self._num_added)
        if key not in self._floors:
            step = self._on_paper(size)
            self._floors[key] = None if step is None else bounds_of(step).floor_bytes
        return self._floors[key]

    def plain_on_paper(self, size: int) -> bool | None:
        """Whether a size fits without a plan; None where it is too near to the budget to tell."""
        nbytes = self.plain_bytes(size)
        if nbytes is None or abs(nbytes - self.budget_bytes) <= self.margin * self.budget_bytes:
            return None
        return nbytes < self.budget_bytes

    def with_a_plan_on_paper(self, size: int) -> bool | None:
        """Whether a size fits with a plan that was made on paper; None where paper is far off."""
        step = self._on_paper(size)
        if step is None or self.margin == inf:
            return None
        if size not in self.papers:
            self.papers[size] = Probe(profile=Profile(step), budget_bytes=self.budget_bytes, captured=False)
        return self.papers[size].fits

    @property
    def margin(self) -> float:
        """Twice the largest share by which the peak of a captured size is not what the others say of it;
        infinite where nothing can be told, or nothing well."""
        if self._margin[0] != self._num_added:
            self._margin = (self._num_added, 2 * self._error())
        return self._margin[1]

    def _error(self) -> float:
        steps = {size: probe.profile.step for size, probe in self.probes.items()}
        errors = [inf] if len(steps) < self.vary.degree + 2 else []
        for size, probe in self.probes.items():
            others = {other: step for other, step in steps.items() if other != size}
            told = step_at(size, others, degree=self.vary.degree)
            peak_bytes = probe.profile.peak_bytes
            errors.append(inf if told is None else abs(Profile(told).peak_bytes / peak_bytes - 1))
        return max(errors) if max(errors) <= MOST_ERROR else inf

    def rows(self, largest_plain: int, largest: int) -> list[FitRow]:
        """All profiled sizes that fit without a plan, the largest ones, and some in between."""
        unit = self.vary.multiple_of
        found = [
            self._row(size, probe)
            for size, probe in self.probes.items()
            if probe.fits_plain or size == largest  # the others would need a search each
        ]
        gap = (largest - largest_plain) // unit
        between = {largest_plain + gap * i // (NUM_BETWEEN + 1) * unit for i in range(1, NUM_BETWEEN + 1)}
        for size in (between | {largest_plain}) - self.probes.keys() - {0}:
            step = self._on_paper(size)
            if step is not None:
                found.append(self._row_on_paper(size, step, self.probes.get(largest)))
        return sorted(found, key=lambda row: row.size)

    def _row(self, size: int, probe: Probe) -> FitRow:
        needs_plan = None if probe.fits_plain else probe.plan
        seconds, peak_bytes = probe.profile.step_seconds, probe.profile.peak_bytes
        recompute = 0.0 if needs_plan is None else needs_plan.recompute_seconds
        return FitRow(
            size=size,
            plain_peak_bytes=peak_bytes,
            peak_bytes=peak_bytes if needs_plan is None else needs_plan.peak_bytes,
            step_seconds=seconds,
            recompute_seconds=recompute,
            per_second=self._per_second(size, seconds + recompute),
            profiled=probe.captured,
        )

    def _row_on_paper(self, size: int, step: Step, largest: Probe | None) -> FitRow:
        """A size whose time to recompute is as far above the proven one as that of the `largest` size is."""
        profile = Profile(step)
        recompute = 0.0
        if profile.peak_bytes > self.budget_bytes:
            assert largest is not None
            recompute = bounds_of(step).seconds(self.budget_bytes) * largest.bound_ratio
        return FitRow(
            size=size,
            plain_peak_bytes=profile.peak_bytes,
            peak_bytes=min(profile.peak_bytes, self.budget_bytes),
            step_seconds=profile.step_seconds,
            recompute_seconds=recompute,
            per_second=self._per_second(size, profile.step_seconds + recompute),
            profiled=False,
        )

    def _per_second(self, size: int, seconds: float) -> float | None:
        return self.vary.amount(size) / seconds if seconds else None

    def _on_paper(self, size: int) -> Step | None:
        steps = {other: probe.profile.step for other, probe in self.probes.items()}
        return step_at(size, steps, degree=self.vary.degree)

    def checks(self, largest_plain: int, largest: int) -> Sequence[Check]:
        """Run the largest size with its plan, and the first that does not fit without."""
        found = []
        above = largest_plain + self.vary.multiple_of
        if above <= self.most:
            with self.working(f"measuring {self.vary.name} {above} without a plan"):
                found.append(self._check_plain(above))
        if largest > largest_plain:
            with self.working(f"measuring {self.vary.name} {largest} with its plan"):
                found.append(self._check_plan(largest))
        return found

    def _check_plain(self, size: int) -> Check:
        step = self._on_paper(size)
        assert step is not None
        peak_bytes = Profile(step).peak_bytes
        reason = why_not(step, peak_bytes=peak_bytes)
        if reason:
            return Check(size=size, planned=False, predicted_peak_bytes=peak_bytes, reason=reason)
        measured = run_plain(self.source(size), predicted=peak_bytes, timed_runs=0).measured_peak_bytes
        return Check(size=size, planned=False, predicted_peak_bytes=peak_bytes, measured_peak_bytes=measured)

    def _check_plan(self, size: int) -> Check:
        plan = self.probes[size].plan
        assert plan is not None
        outcome = run_plan(self.source(size), plan, timed_runs=0)
        return Check(
            size=size,
            planned=True,
            predicted_peak_bytes=plan.peak_bytes,
            measured_peak_bytes=outcome.measurement.planned.measured_peak_bytes,
            exact=outcome.measurement.exact,
            differences=outcome.measurement.differences,
            reason=outcome.reason,
        )


def _profile(source: Source) -> Profile:
    target = source.load() if isinstance(source, TargetSpec) else source
    return api.profile(target.model, target.batch, optimizer=target.optimizer, loss=target.loss)


def _name(factory: Callable[[int], Any]) -> str:
    return getattr(factory, "__name__", type(factory).__name__)
