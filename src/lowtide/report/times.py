"""Where a step's time goes: by region, by op, by module, and what recompute adds to each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lowtide.facts import Node, Region, Run, Step
from lowtide.planning.simulate import Timeline, is_again, source_of
from lowtide.report.transfers import WAIT, run_waits

RECOMPUTE = "recompute"
PARTS = (*Region, RECOMPUTE)
"""The parts of a bar, in the order they are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRow:
    """Seconds of one group of ops, split into the `PARTS`."""

    name: str
    seconds: float
    parts: tuple[float, ...]
    num_runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    node: Node
    seconds: float
    part: str


def timed(step: Step, runs: Sequence[Run]) -> list[_Timed]:
    """Every run of a schedule with its time and the part of the step that it belongs to."""
    found = []
    for run in runs:
        node, seconds = step.nodes[run.rank], source_of(step, run).seconds
        part = RECOMPUTE if is_again(step, run) or node.on_demand else node.region
        found.append(_Timed(node=node, seconds=seconds, part=part))
    return found


def by_region(step: Step, runs: Sequence[Run]) -> list[TimeRow]:
    rows = {row.name: row for row in _group(timed(step, runs), lambda run: run.part)}
    return [rows[part] for part in PARTS if part in rows and rows[part].num_runs]


def waiting(timeline: Timeline) -> list[TimeRow]:
    """What the step waits for its store, where it does."""
    waits = [wait for wait in run_waits(timeline) if wait]
    if not waits:
        return []
    parts = tuple(sum(waits) if part == RECOMPUTE else 0.0 for part in PARTS)
    return [TimeRow(name=WAIT, seconds=sum(waits), parts=parts, num_runs=len(waits))]


def by_op(step: Step, runs: Sequence[Run], *, limit: int = 12) -> list[TimeRow]:
    """The ops that take longest; all others in a last row. Overloads named `default` go without."""
    all_runs = [run for run in timed(step, runs) if run.seconds > 0]
    return _limited(_group(all_runs, lambda run: run.node.op.removesuffix(".default")), limit)


def by_module(step: Step, runs: Sequence[Run], *, limit: int = 12) -> list[TimeRow]:
    """Modules at whatever depth tells them apart: the slowest group is split while there is room."""
    all_runs = [run for run in timed(step, runs) if run.seconds > 0]
    groups: dict[tuple[str, ...], list[_Timed]] = {(): all_runs}
    finished: set[tuple[str, ...]] = set()
    while open_groups := [path for path in groups if path not in finished]:
        path = min(open_groups, key=lambda p: (-_seconds(groups[p]), p))
        split: dict[tuple[str, ...], list[_Timed]] = {}
        for run in groups[path]:
            module = tuple(run.node.module.split(".")) if run.node.module else ()
            split.setdefault(module[: len(path) + 1], []).append(run)
        if len(groups) - 1 + len(split) > limit or set(split) == {path}:
            finished.add(path)
            continue
        del groups[path]
        groups.update(split)
        # Runs of the module itself, outside its children, cannot be split further.
        finished |= {path} & set(split)
    named = {id(run): ".".join(path) or "(no module)" for path, members in groups.items() for run in members}
    return _limited(_group(all_runs, lambda run: named[id(run)]), limit)


def _group(all_runs: Sequence[_Timed], key: Callable[[_Timed], str]) -> list[TimeRow]:
    groups: dict[str, list[_Timed]] = {}
    for run in all_runs:
        groups.setdefault(key(run), []).append(run)
    rows = [_row(name, members) for name, members in groups.items()]
    return sorted(rows, key=lambda row: (-row.seconds, row.name))


def _row(name: str, members: Sequence[_Timed]) -> TimeRow:
    parts = tuple(_seconds([run for run in members if run.part == part]) for part in PARTS)
    return TimeRow(name=name, seconds=sum(parts), parts=parts, num_runs=len(members))


def _seconds(members: Sequence[_Timed]) -> float:
    return sum(run.seconds for run in members)


def _limited(rows: Sequence[TimeRow], limit: int) -> list[TimeRow]:
    if len(rows) <= limit:
        return list(rows)
    rest = rows[limit - 1 :]
    other = TimeRow(
        name=f"{len(rest)} others",
        seconds=sum(row.seconds for row in rest),
        parts=tuple(sum(row.parts[i] for row in rest) for i in range(len(PARTS))),
        num_runs=sum(row.num_runs for row in rest),
    )
    return [*rows[: limit - 1], other]
