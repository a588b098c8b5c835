"""How large a batch fits into a budget, without and with a plan, and which size is the fastest.

Nothing is run to find out. Two small sizes are captured and profiled; from them a step of any size is made
on paper (`between`), and the sizes where it should stop to fit are captured in turn, until one fits and the
next does not. What was found can then be measured.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any

from lowtide import api
from lowtide.errors import BudgetTooSmall, LowtideError
from lowtide.experiments.between import step_at
from lowtide.experiments.machine import why_not
from lowtide.experiments.measured import run_plain, run_plan
from lowtide.facts import Step
from lowtide.facts.sizes import parse_size
from lowtide.facts.units import format_size
from lowtide.planning.bounds.curve import Bounds
from lowtide.planning.search.table import make_table
from lowtide.plans import Plan
from lowtide.profiles import Profile
from lowtide.zoo.targets import Target, TargetSpec, call_factory

FIRST = (8, 16)
"""What is captured first, in multiples of the size's unit. Smaller steps lack some ways to save memory, which
pay for large values alone, so that nothing can be told from them."""
MOST = 1 << 20
"""No larger size is looked at, unless said otherwise."""
NUM_BETWEEN = 4
"""Sizes between the largest without and the largest with a plan that are planned on paper."""

Source = TargetSpec | Target
Profiler = Callable[[Source], Profile]
Working = Callable[[str], AbstractContextManager[None]]


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

    `largest_plain` and `largest` fit without and with a plan, and the next size does not, by prediction; 0
    where no size fits. No plan of the smallest size that was looked at needs less than `lowest_bytes`.
    Nothing above `most` was looked at. `rows` are by size, `checks` were measured.
    """

    budget_bytes: int
    vary: str
    unit: str
    multiple_of: int
    most: int
    largest_plain: int
    largest: int
    lowest_bytes: int
    rows: tuple[FitRow, ...] = field(repr=False)
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
    for size in FIRST:
        search.probe(min(size * vary.multiple_of, search.most))
    largest_plain = search.largest(lambda probe: probe.fits_plain, search.plain_bytes)
    largest = search.largest(lambda probe: probe.fits, search.lowest_bytes, low=largest_plain)
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

    def largest(
        self, fits: Callable[[_Probe], bool], needed: Callable[[int], float | None], *, low: int = 0
    ) -> int:
        """The largest size that `fits`, while the next does not; `low`, which is known to fit, or larger.

        `needed`: about how many bytes a size needs, None where nobody can tell. Every fourth size is chosen
        without it, so that wrong guesses cost a few times the captures of halving at most.
        """
        unit, most = self.vary.multiple_of, self.most
        high = most + unit
        for turn in count():
            if high - low == unit:
                return low
            middle = min(2 * low, most) if high > most else (low + high) // 2 // unit * unit
            guess = self._guess(low, high, needed) if turn % 4 < 3 else None
            size = max(low + unit, middle if guess is None else guess)
            self.probe(size)
            low, high = (size, high) if fits(self.probes[size]) else (low, size)
        raise AssertionError

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
        near = min(ratios, key=lambda other: (abs(other - size), other), default=None)
        return _bounds(step).floor_bytes * (1.0 if near is None else ratios[near])

    def rows(self, largest_plain: int, largest: int) -> list[FitRow]:
        """All profiled sizes that fit without a plan, the largest with one, and some in between."""
        unit = self.vary.multiple_of
        found = [
            self._row(size, probe)
            for size, probe in self.probes.items()
            if probe.fits_plain or size == largest  # the others would need a search each
        ]
        gap = (largest - largest_plain) // unit
        between = {largest_plain + gap * i // (NUM_BETWEEN + 1) * unit for i in range(1, NUM_BETWEEN + 1)}
        for size in between - self.probes.keys() - {0}:
            step = self._on_paper(size)
            if step is not None:
                found.append(self._row_on_paper(size, step, self.probes[largest]))
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

    def _row_on_paper(self, size: int, step: Step, largest: _Probe) -> FitRow:
        """A size whose time to recompute is as far above the proven one as that of the `largest` size is."""
        profile = Profile(step)
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
        if above in self.probes:
            with self.working(f"measuring {self.vary.name} {above} without a plan"):
                found.append(self._check_plain(above))
        if largest > largest_plain:
            with self.working(f"measuring {self.vary.name} {largest} with its plan"):
                found.append(self._check_plan(largest))
        return found

    def _check_plain(self, size: int) -> Check:
        probe = self.probes[size]
        peak_bytes = probe.profile.peak_bytes
        reason = why_not(probe.profile.step, peak_bytes=peak_bytes)
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
