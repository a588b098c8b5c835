"""The times of a step, as the page, the plots and the files show them.

The time by region, op and module, with the part of recompute in each; and the transfers to a store and back:
the start of each, the part hidden behind compute, and the stalls of the step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lowtide.facts import Node, Region, Run, Step
from lowtide.planning.simulate import Timeline, is_remat, source_of
from lowtide.planning.transfer_model import Traffic, Transfer

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
        part = RECOMPUTE if is_remat(step, run) or node.on_demand else node.region
        found.append(_Timed(node=node, seconds=seconds, part=part))
    return found


def by_region(step: Step, runs: Sequence[Run]) -> list[TimeRow]:
    rows = {row.name: row for row in _group(timed(step, runs), lambda run: run.part)}
    return [rows[part] for part in PARTS if part in rows and rows[part].num_runs]


def waiting(timeline: Timeline) -> list[TimeRow]:
    """The stalls of the step for its store, if any."""
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
    """Modules, the slowest split further while rows are left."""
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
        # runs of the module itself, outside its children, cannot be split further
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


WRITE, READ = "to the store", "from the store"
WAIT = "waiting for the store"

Point = tuple[float, int]
"""(seconds, bytes)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferBar:
    """One transfer with the name of its value."""

    name: str
    direction: str
    nbytes: int
    begin_seconds: float
    end_seconds: float
    stall_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUse:
    """The transfers of a step in their order, and the bytes sent so far."""

    store: str
    moves: tuple[TransferBar, ...]
    written: tuple[Point, ...]
    read: tuple[Point, ...]
    step_seconds: float
    transfer_seconds: float
    stall_seconds: float

    @property
    def store_bytes(self) -> int:
        return self.written[-1][1]

    @property
    def read_bytes(self) -> int:
        return self.read[-1][1]

    @property
    def hidden_seconds(self) -> float:
        return max(0.0, self.transfer_seconds - self.stall_seconds)

    @property
    def hidden_share(self) -> float:
        return self.hidden_seconds / self.transfer_seconds if self.transfer_seconds else 1.0

    def lines(self, width: float, height: float) -> list[tuple[str, str]]:
        """(direction, points of an SVG's line) for a picture of that size, the origin at its upper left."""
        most = max(self.store_bytes, self.read_bytes, 1)
        across = width / self.step_seconds if self.step_seconds else 0.0
        return [
            (
                direction,
                " ".join(f"{seconds * across:.2f},{height * (1 - n / most):.2f}" for seconds, n in points),
            )
            for direction, points in ((WRITE, self.written), (READ, self.read))
        ]


def traffic_of(timeline: Timeline | None) -> Traffic | None:
    """The traffic of a timeline that has any."""
    if timeline is None or timeline.traffic is None or not timeline.traffic.transfers:
        return None
    return timeline.traffic


def store_use(step: Step, timeline: Timeline | None) -> StoreUse | None:
    """None where nothing is offloaded."""
    traffic = traffic_of(timeline)
    if timeline is None or traffic is None or step.transfer_speed is None:
        return None
    return StoreUse(
        store=step.transfer_speed.store,
        moves=tuple(
            TransferBar(
                name=step.nodes[transfer.node].name,
                direction=direction_of(transfer),
                nbytes=transfer.nbytes,
                begin_seconds=transfer.begin_seconds,
                end_seconds=transfer.end_seconds,
                stall_seconds=transfer.stall_seconds,
            )
            for transfer in traffic.transfers
        ),
        written=_sent(traffic, timeline.seconds, is_write=True),
        read=_sent(traffic, timeline.seconds, is_write=False),
        step_seconds=timeline.seconds,
        transfer_seconds=traffic.transfer_seconds,
        stall_seconds=traffic.stall_seconds,
    )


def run_waits(timeline: Timeline) -> list[float]:
    """Seconds that every run waits for the store before it begins."""
    waits = [0.0] * len(timeline.runs)
    traffic = traffic_of(timeline)
    for transfer in traffic.transfers if traffic is not None else ():
        if transfer.awaited_at >= 0:
            waits[transfer.awaited_at] += transfer.stall_seconds
    return waits


def run_starts(step: Step, timeline: Timeline) -> list[float]:
    """When every run begins, and when the last one ends."""
    waits = run_waits(timeline)
    starts = []
    now = 0.0
    for run, wait in zip(timeline.runs, waits, strict=True):
        now += wait
        starts.append(now)
        now += source_of(step, run).seconds
    return [*starts, now]


def direction_of(transfer: Transfer) -> str:
    return WRITE if transfer.is_write else READ


def _sent(traffic: Traffic, end_seconds: float, *, is_write: bool) -> tuple[Point, ...]:
    """Bytes sent up to the corners of the line, from the start of the step to its end."""
    points: list[Point] = [(0.0, 0)]
    nbytes = 0
    for transfer in traffic.transfers:
        if transfer.is_write is is_write:
            points.append((transfer.begin_seconds, nbytes))
            nbytes += transfer.nbytes
            points.append((transfer.end_seconds, nbytes))
    return (*points, (max(end_seconds, points[-1][0]), nbytes))
