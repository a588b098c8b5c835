"""Transfers to a store and back, as the page and the plots show them."""

from dataclasses import dataclass

from lowtide.facts import Step
from lowtide.planning.offload.transfer_model import Traffic, Transfer
from lowtide.planning.simulate import Timeline, source_of

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
    """What a step sends to a store: all transfers in their order, and the bytes sent up to every moment."""

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
        moves=tuple(_move(step, transfer) for transfer in traffic.transfers),
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


def _move(step: Step, transfer: Transfer) -> TransferBar:
    return TransferBar(
        name=step.nodes[transfer.node].name,
        direction=direction_of(transfer),
        nbytes=transfer.nbytes,
        begin_seconds=transfer.begin_seconds,
        end_seconds=transfer.end_seconds,
        stall_seconds=transfer.stall_seconds,
    )


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
