"""How large a batch fits into a budget, without and with a plan, and which size is the fastest.

Nothing is run to find out. Two small sizes are captured and profiled; from them a step of any size is made
on paper (`between`), and the largest that should fit with a plan is captured as the third. It shows how far
off paper is, and sizes that are further than that from the budget need no capture of their own. Others are
captured in turn, until one fits and the next does not. What was found can then be measured.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from math import inf
from typing import Any

from lowtide import api
from lowtide.errors import BudgetTooSmall, LowtideError
from lowtide.experiments.between import step_at
from lowtide.experiments.fit_records import MOST, Check, Fit, FitRow, Vary
from lowtide.experiments.machine import why_not
from lowtide.experiments.measured import run_plain, run_plan
from lowtide.facts import Step
from lowtide.facts.sizes import parse_size
from lowtide.planning.bounds.curve import Bounds
from lowtide.planning.search.table import make_table
from lowtide.plans import Plan
from lowtide.profiles import Profile
from lowtide.zoo.targets import Target, TargetSpec, call_factory

__all__ = ["MOST", "Check", "Fit", "FitRow", "Source", "Vary", "find_fit", "fit"]

FIRST = (8, 16)
"""What is captured first, in multiples of the size's unit. Smaller steps lack some ways to save memory, which
pay for large values alone, so that nothing can be told from them."""
MOST_ERROR = 0.01
"""Paper that is further off than this share tells nothing."""
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
    largest = search.largest_with_a_plan(largest_plain)
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


def budget_bytes_of(budget: str | int) -> int:
    """Bytes of a budget that is the same for all sizes."""
    if isinstance(budget, str) and budget.strip().endswith("%"):
        raise LowtideError(
            f"'{budget}' is a share of one size's own peak, and here sizes differ: write bytes, such as 8GiB"
        )
    return parse_size(budget)


@dataclass(frozen=True, kw_only=True)
class _Probe:
    """A size that was captured and profiled. It is planned when somebody asks for its `plan`."""

    profile: Profile
    budget_bytes: int

    @property
    def fits_plain(self) -> bool:
        return self.profile.peak_bytes <= self.budget_bytes

    @property
    def fits(self) -> bool:
        return self.fits_plain or self.plan is not None

    @cached_property
    def bounds(self) -> Bounds:
        return _bounds(self.profile.step)

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


@dataclass(slots=True, kw_only=True)
class _Search:
    source: Callable[[int], Source]
    budget_bytes: int
    vary: Vary
    profile: Profiler
    working: Working
    probes: dict[int, _Probe] = field(default_factory=dict)
    papers: dict[int, _Probe] = field(default_factory=dict)
    """sizes that were planned without having been captured"""
    _margin: tuple[int, float] = (0, inf)

    @property
    def most(self) -> int:
        return self.vary.most // self.vary.multiple_of * self.vary.multiple_of

    def probe(self, size: int) -> None:
        """Capture and profile one size."""
        if size not in self.probes:
            with self.working(f"{self.vary.name} {size}"):
                found = self.profile(self.source(size))
            # without the model behind it, of which there would be one for each size
            self.probes[size] = _Probe(profile=Profile(found.step), budget_bytes=self.budget_bytes)

    def begin(self) -> None:
        """Capture sizes to tell others from."""
        unit = self.vary.multiple_of
        for size in FIRST:
            self.probe(min(size * unit, self.most))
        guess = self._guess(0, self.most + unit, self.lowest_bytes)
        if guess:
            self.probe(guess)

    def largest(
        self,
        fits: Callable[[_Probe], bool],
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
        for turn in count():
            if high - low == unit:
                return low
            middle = min(2 * low, most) if high > most else (low + high) // 2 // unit * unit
            guess = self._guess(low, high, needed) if turn % 4 < 3 else None
            size = max(low + unit, middle if guess is None else guess)
            does_fit = None if size in self.probes else on_paper(size)
            if does_fit is None:
                self.probe(size)
                does_fit = fits(self.probes[size])
            low, high = (size, high) if does_fit else (low, size)
        raise AssertionError

    def largest_with_a_plan(self, largest_plain: int) -> int:
        """As `largest`; where it is larger than without a plan, it is captured."""
        while True:
            size = self.largest(
                lambda probe: probe.fits, self.lowest_bytes, self.with_a_plan_on_paper, low=largest_plain
            )
            if size == largest_plain or size in self.probes:
                return size
            self.probe(size)

    def _guess(self, low: int, high: int, needed: Callable[[int], float | None]) -> int | None:
        """The largest size from `low` to below `high` that seems to fit."""
        unit = self.vary.multiple_of
        # Growing from `low`, so that nothing is predicted far above what can be.
        step = unit
        while high - low > unit:
            size = min(low + step, high - unit)
            nbytes = needed(size)
            if nbytes is None:
                return None
            if nbytes > self.budget_bytes:
                high = size
                break
            low, step = size, 2 * step
        while high - low > unit:
            size = (low + high) // 2 // unit * unit
            nbytes = needed(size)
            if nbytes is None:
                return None
            low, high = (low, size) if nbytes > self.budget_bytes else (size, high)
        return low

    def plain_bytes(self, size: int) -> float | None:
        step = self._on_paper(size)
        return None if step is None else Profile(step).peak_bytes

    def lowest_bytes(self, size: int) -> float | None:
        """What no plan can be below, as many times as for the next size that was planned."""
        step = self._on_paper(size)
        if step is None:
            return None
        ratios = {other: probe.floor_ratio for other, probe in self.probes.items() if probe.floor_ratio > 1}
        ratios |= {other: paper.floor_ratio for other, paper in self.papers.items() if paper.floor_ratio > 1}
        near = min(ratios, key=lambda other: (abs(other - size), other), default=None)
        return _bounds(step).floor_bytes * (1.0 if near is None else ratios[near])

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
            self.papers[size] = _Probe(profile=Profile(step), budget_bytes=self.budget_bytes)
        return self.papers[size].fits

    @property
    def margin(self) -> float:
        """Twice the largest share by which the peak of a captured size is not what the others say of it;
        infinite where nothing can be told, or nothing well."""
        if self._margin[0] != len(self.probes):
            self._margin = (len(self.probes), 2 * self._error())
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

    def _row(self, size: int, probe: _Probe) -> FitRow:
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
            profiled=True,
        )

    def _row_on_paper(self, size: int, step: Step, largest: _Probe | None) -> FitRow:
        """A size whose time to recompute is as far above the proven one as that of the `largest` size is."""
        profile = Profile(step)
        recompute = 0.0
        if profile.peak_bytes > self.budget_bytes:
            assert largest is not None
            recompute = _bounds(step).seconds(self.budget_bytes) * largest.bound_ratio
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


def _bounds(step: Step) -> Bounds:
    return Bounds(make_table(step))


def _profile(source: Source) -> Profile:
    target = source.load() if isinstance(source, TargetSpec) else source
    return api.profile(target.model, target.batch, optimizer=target.optimizer, loss=target.loss)


def _name(factory: Callable[[int], Any]) -> str:
    return getattr(factory, "__name__", type(factory).__name__)
