"""Two runs side by side: their figures, and what happens to activations in one and not in the other."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lowtide.facts import Decision, Solution, Step
from lowtide.planning.schedules import eager_timeline
from lowtide.planning.simulate import Timeline, simulate
from lowtide.report.module_summary import FATES, fate_of, pattern_of
from lowtide.report.results import Measurement, relative_increase
from lowtide.report.style import UNKNOWN, duration, percent, size

NOT_THERE = "not there"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One of the two: what its files say. `name` is the path as typed, `target` what was planned.

    `step` comes from a profile, `solution` from a plan, `measurement` from a verification; each may be None.
    """

    name: str
    target: str = ""
    step: Step | None = None
    solution: Solution | None = None
    measurement: Measurement | None = None
    floor_bytes: int | None = None

    @property
    def timelines(self) -> tuple[Timeline | None, Timeline | None]:
        """Of the baseline and of the plan; None where the files lack what they need."""
        if self.step is None:
            return None, None
        plan = self.solution
        return eager_timeline(self.step), simulate(self.step, plan.schedule.runs) if plan else None

    @property
    def figures(self) -> dict[str, Any]:
        """All figures by name; None for those that the files do not have."""
        plan, found = self.solution, self.measurement
        baseline = plan.baseline_peak_bytes if plan else self._baseline_peak_bytes
        nbytes = dict.fromkeys(FATES, 0)
        for decision in plan.decisions if plan else ():
            nbytes[fate_of(decision)] += decision.nbytes
        return {
            "file": self.name,
            "target": self.target or None,
            "planner": plan.planner if plan else None,
            "budget_bytes": plan.budget_bytes if plan else None,
            "baseline_peak_bytes": baseline,
            "baseline_measured_peak_bytes": found.baseline.measured_peak_bytes if found else None,
            "peak_bytes": plan.peak_bytes if plan else None,
            "measured_peak_bytes": found.planned.measured_peak_bytes if found else None,
            "floor_bytes": self.floor_bytes,
            "step_seconds": plan.step_seconds if plan else self._baseline_seconds,
            "overhead": plan.overhead if plan else None,
            "measured_overhead": found.overhead if found else None,
            "noise": found.noise if found else None,
            "baseline_measured_seconds": found.baseline.seconds_median if found else None,
            "measured_seconds": found.planned.seconds_median if found else None,
            "exact": found.exact if found else None,
            **{f"{fate}_bytes": nbytes[fate] if plan else None for fate in FATES},
        }

    @property
    def _baseline_peak_bytes(self) -> int | None:
        return eager_timeline(self.step).peak_bytes if self.step is not None else None

    @property
    def _baseline_seconds(self) -> float | None:
        return eager_timeline(self.step).seconds if self.step is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleChange:
    """Activations of one pattern of modules that have another fate in B than in A."""

    path: str
    was: str
    now: str
    num_activations: int
    before_bytes: int
    after_bytes: int
    added_seconds: float


def figure_rows(a: ComparedRun, b: ComparedRun) -> list[tuple[str, str, str, str]]:
    """(what, in A, in B, the change) for each figure that one of the two has."""
    one, other = a.figures, b.figures
    rows = []
    for label, key, say, difference in _FIGURES:
        left, right = one[key], other[key]
        is_same_target = key == "target" and left == right  # the title says it
        if is_same_target or _is_empty(key, left, right):
            continue
        change = (
            UNKNOWN if left is None or right is None else "=" if left == right else difference(left, right)
        )
        rows.append((label, _said(say, left, one), _said(say, right, other), change))
    return rows


def _is_empty(key: str, left: Any, right: Any) -> bool:
    """Whether neither has the figure; bytes that both have none of are left out as well."""
    return all(value is None or (value == 0 and key not in _ALSO_ZERO) for value in (left, right))


def _said(say: Callable[[Any, dict[str, Any]], str], value: Any, figures: dict[str, Any]) -> str:
    return UNKNOWN if value is None else say(value, figures)


def _text(value: Any, _: dict[str, Any]) -> str:
    return str(value)


def _size(value: int, _: dict[str, Any]) -> str:
    return size(value)


def _time(value: float, _: dict[str, Any]) -> str:
    return duration(value)


def _share(value: float, _: dict[str, Any]) -> str:
    return percent(value)


def _measured_share(value: float, figures: dict[str, Any]) -> str:
    noise = figures["noise"]
    return percent(value) + ("" if noise is None else f" ± {100 * noise:.1f}")


def _exact(value: bool, _: dict[str, Any]) -> str:
    return "exact" if value else "differ"


def _other_text(_: Any, __: Any) -> str:
    return "differs"


def _fewer_bytes(before: int, after: int) -> str:
    share = relative_increase(before, after)
    more = "+" if after > before else "−"
    return f"{more}{size(abs(after - before))}" + ("" if share is None else f" ({percent(share)})")


def _less_time(before: float, after: float) -> str:
    return percent(relative_increase(before, after))


def _points(before: float, after: float) -> str:
    return f"{'+' if after > before else '−'}{100 * abs(after - before):.1f} points"


_FIGURES: tuple[tuple[str, str, Callable[[Any, dict[str, Any]], str], Callable[[Any, Any], str]], ...] = (
    ("target", "target", _text, _other_text),
    ("planner", "planner", _text, _other_text),
    ("budget", "budget_bytes", _size, _fewer_bytes),
    ("peak, predicted", "peak_bytes", _size, _fewer_bytes),
    ("peak, measured", "measured_peak_bytes", _size, _fewer_bytes),
    ("baseline, predicted", "baseline_peak_bytes", _size, _fewer_bytes),
    ("baseline, measured", "baseline_measured_peak_bytes", _size, _fewer_bytes),
    ("floor", "floor_bytes", _size, _fewer_bytes),
    ("time added, predicted", "overhead", _share, _points),
    ("time added, measured", "measured_overhead", _measured_share, _points),
    ("step, profiled", "step_seconds", _time, _less_time),
    ("step, measured", "baseline_measured_seconds", _time, _less_time),
    ("planned step, measured", "measured_seconds", _time, _less_time),
    ("results", "exact", _exact, _other_text),
    *((f"bytes {fate}", f"{fate}_bytes", _size, _fewer_bytes) for fate in FATES),
)


_ALSO_ZERO = ("overhead", "measured_overhead", "exact")
"""Figures that are shown where they are zero, or no."""


def have_common(a: ComparedRun, b: ComparedRun) -> bool:
    """Whether the plans are of one model: at least half of the activations have the same names."""
    one, other = (_by_name(run.solution.decisions if run.solution else ()) for run in (a, b))
    return 2 * len(one.keys() & other.keys()) >= max(1, min(len(one), len(other)))


def module_changes(a: ComparedRun, b: ComparedRun) -> list[ModuleChange]:
    """What activations become in B, by module; the most bytes first. Activations are matched by name."""
    one, other = (_by_name(run.solution.decisions if run.solution else ()) for run in (a, b))
    if not have_common(a, b):
        return []
    groups: dict[tuple[str, str, str], list[tuple[Decision | None, Decision | None]]] = {}
    for key in dict.fromkeys((*one, *other)):
        before, after = one.get(key), other.get(key)
        was, now = (NOT_THERE if found is None else fate_of(found) for found in (before, after))
        if was != now:
            groups.setdefault((pattern_of(key[0]), was, now), []).append((before, after))
    changes = [
        ModuleChange(
            path=path,
            was=was,
            now=now,
            num_activations=len(pairs),
            before_bytes=sum(before.nbytes for before, _ in pairs if before),
            after_bytes=sum(after.nbytes for _, after in pairs if after),
            added_seconds=sum(after.seconds for _, after in pairs if after)
            - sum(before.seconds for before, _ in pairs if before),
        )
        for (path, was, now), pairs in groups.items()
    ]
    return sorted(changes, key=lambda c: (-max(c.before_bytes, c.after_bytes), c.path, c.was, c.now))


def _by_name(decisions: Iterable[Decision]) -> dict[tuple[str, str], Decision]:
    return {(decision.module, decision.name): decision for decision in decisions}


def change_rows(changes: Iterable[ModuleChange]) -> list[tuple[str, str, str, str, str]]:
    """(module, change, activations, bytes, time) in words."""
    return [
        (
            change.path,
            f"{change.was} → {change.now}",
            str(change.num_activations),
            size(change.after_bytes or change.before_bytes),
            f"{'+' if change.added_seconds > 0 else '−'}{duration(abs(change.added_seconds))}"
            if change.added_seconds
            else "",
        )
        for change in changes
    ]


def headline(a: ComparedRun, b: ComparedRun) -> str:
    """Peak and time of B against A in one sentence, measured where both are."""
    one, other = a.figures, b.figures
    parts = [
        _compared(one, other, ("measured_peak_bytes", "peak_bytes", "baseline_peak_bytes"), _peak_words),
        _compared(one, other, ("measured_overhead", "overhead"), _time_words),
    ]
    found = [part for part in parts if part is not None]
    if not found:
        return "A and B have no figure in common"
    if len({basis for _, basis in found}) == 1:
        return f"B {' and '.join(words for words, _ in found)} ({found[0][1]})"
    return f"B {' and '.join(f'{words} ({basis})' for words, basis in found)}"


def _compared(
    one: dict[str, Any], other: dict[str, Any], keys: tuple[str, ...], say: Callable[[Any, Any], str]
) -> tuple[str, str] | None:
    """The first figure that both have, in words, and whether it is measured."""
    for key in keys:
        if one[key] is not None and other[key] is not None:
            return say(one[key], other[key]), "measured" if key.startswith("measured") else "predicted"
    return None


def _peak_words(before: int, after: int) -> str:
    if before == after:
        return f"has the same peak of {size(after)}"
    return f"peaks {size(abs(after - before))} {'higher' if after > before else 'lower'} at {size(after)}"


def _time_words(before: float, after: float) -> str:
    if before == after:
        return f"adds the same time, {percent(after)}"
    more = "more" if after > before else "less"
    return f"adds {_points(before, after).lstrip('+−')} {more} time, {percent(after)}"


def notes_of(a: ComparedRun, b: ComparedRun) -> list[str]:
    """What limits the comparison."""
    prints = {found.fingerprint for run in (a, b) if (found := run.solution or run.step) is not None}
    notes = []
    if len(prints) > 1:
        how = "matched by module and name" if have_common(a, b) else "not the same, and not compared"
        notes.append(f"A and B are different steps: their activations are {how}")
    lacking = [name for name, run in (("A", a), ("B", b)) if run.solution is None]
    if lacking:
        has = "has" if len(lacking) == 1 else "have"
        notes.append(f"{' and '.join(lacking)} {has} no plan: only the baselines are compared")
    return notes
