"""When a schedule frees offloaded values and begins to fetch them, so that transfers hide behind compute.

First the live bytes are as few as possible: a value is freed right after its last forward use, and fetched
right before its first backward use. Then values stay live longer, and fetches begin earlier, as far as the
budget leaves spare bytes at every run in between and the transfers need the time. Writes are placed forward
in time. Reads are placed backward, from the end of the step: mirrored in time, a read with a deadline is a
write with a release time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lowtide.facts import Region, Run, Step, TransferSpeed
from lowtide.planning.simulate import Timeline, recompute_slots, simulate, source_of
from lowtide.planning.transfer_model import is_fetch, last_forward_reads, transfer_bytes, value_of


@dataclass(frozen=True, slots=True)
class _Fetch:
    """A run that fetches a value, before one of the runs `earliest` to `latest` of the frame."""

    run: Run
    earliest: int
    latest: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Release:
    """A movable node, after one of the runs `earliest` to `latest` of the frame; `made` made its value."""

    node: int
    made: int
    earliest: int
    latest: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Frame:
    """A schedule without its releases and fetches, and the ranges of positions for these."""

    runs: tuple[Run, ...]
    seconds: tuple[float, ...]
    releases: tuple[_Release, ...]
    fetches: tuple[_Fetch, ...]


def placed(step: Step, runs: Sequence[Run], *, budget_bytes: int, slack: float = 1.0) -> Timeline:
    """The schedule `runs` with its transfers placed so that they hide as well as the budget allows.

    The live bytes are within the budget wherever moving transfers alone can do that. Transfers are placed as
    if they took `slack` times as long, since a store is not always as fast as it was measured.
    """
    assert step.transfer_speed is not None
    frame = _frame(step, _used_late(step, runs))
    smallest = _together(
        frame, [release.earliest for release in frame.releases], [fetch.latest for fetch in frame.fetches]
    )
    live_bytes = simulate(step, smallest).live_bytes
    in_frame = [not (step.nodes[run.rank].movable or is_fetch(step, run)) for run in smallest]
    spare_bytes = budget_bytes - live_bytes[in_frame]
    slow = replace(
        step.transfer_speed,
        write_bytes_per_second=step.transfer_speed.write_bytes_per_second / slack,
        read_bytes_per_second=step.transfer_speed.read_bytes_per_second / slack,
        latency_seconds=step.transfer_speed.latency_seconds * slack,
    )
    releases, fetches = _release_places(frame, slow, spare_bytes), _fetch_places(frame, slow, spare_bytes)
    return simulate(step, _together(frame, releases, fetches))


def _used_late(step: Step, runs: Sequence[Run]) -> list[Run]:
    """The same schedule, with fetches and views of fetched values right before their use."""
    latest: dict[int, int] = {}
    sources: list[list[int]] = []
    late: set[int] = set()
    for position, run in enumerate(runs):
        source = source_of(step, run)
        sources.append([latest[read] for read in source.reads])
        is_view = not run.is_first and not source.makes and bool(source.reads)
        if is_fetch(step, run) or (is_view and late.issuperset(sources[-1])):
            late.add(position)
        latest[run.rank] = position
    found: list[Run] = []
    there: set[int] = set()

    def put(position: int) -> None:
        if position in there:
            return
        there.add(position)
        for source in sources[position]:
            if source in late:
                put(source)
        found.append(runs[position])

    for position in range(len(runs)):
        if position not in late:
            put(position)
    return found


def _frame(step: Step, runs: Sequence[Run]) -> _Frame:
    kept: list[Run] = []
    released: list[int] = []
    waiting: dict[int, Run] = {}
    last_read: dict[int, int] = {}
    fetches: list[_Fetch] = []
    first_run: dict[int, int] = {}
    for run in runs:
        if run.is_first and step.nodes[run.rank].movable:
            released.append(run.rank)
            continue
        if is_fetch(step, run):
            waiting[run.rank] = run
            continue
        for read in source_of(step, run).reads:
            if read in waiting:
                fetch = waiting.pop(read)
                earliest = last_read.get(read, -1) + 1
                fetches.append(_Fetch(fetch, earliest, len(kept), transfer_bytes(step, read)))
            last_read[read] = len(kept)
        if run.is_first:
            first_run[run.rank] = len(kept)
        last_read[run.rank] = len(kept)
        kept.append(run)
    fetched = {fetch.run.rank for fetch in fetches}
    slots, starts = _slot_starts(step, kept), _forward_starts(step, kept)
    fetches = [
        replace(
            fetch,
            earliest=max(
                fetch.earliest, (starts if fetch.run.is_first else slots)[step.nodes[fetch.run.rank].segment]
            ),
        )
        for fetch in fetches
    ]
    return _Frame(
        runs=tuple(kept),
        seconds=tuple(source_of(step, run).seconds for run in kept),
        releases=_releases(step, [node for node in released if value_of(step, node) in fetched], first_run),
        fetches=tuple(fetches),
    )


def _slot_starts(step: Step, runs: Sequence[Run]) -> dict[int, int]:
    """By segment, the first run before which its values may be fetched."""
    slots = recompute_slots(step)
    starts: dict[int, int] = {}
    for position, run in enumerate(runs):
        if run.is_first and slots[run.rank] >= 0:
            starts.setdefault(slots[run.rank], position)
    return starts


def _forward_starts(step: Step, runs: Sequence[Run]) -> dict[int, int]:
    """By segment, the first run before which the weights of its forward part may be fetched."""
    starts: dict[int, int] = {}
    for position, run in enumerate(runs):
        node = step.nodes[run.rank]
        if node.region is not Region.FORWARD:
            break
        if node.op != "placeholder":
            starts.setdefault(node.segment, position)
    return starts


def _releases(step: Step, released: Sequence[int], first_run: Mapping[int, int]) -> tuple[_Release, ...]:
    last_use = last_forward_reads(step)
    ends: dict[int, int] = {}
    for node in step.nodes[: step.first_backward_rank]:
        if node.rank in first_run and node.op != "output":
            ends[node.segment] = first_run[node.rank]
    found = [
        _Release(
            node=node,
            made=first_run[value_of(step, node)],
            earliest=first_run[last_use[node]],
            latest=ends[step.nodes[node].segment],
            nbytes=transfer_bytes(step, value_of(step, node)),
        )
        for node in released
    ]
    return tuple(sorted(found, key=lambda release: (release.made, release.node)))


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The transfer of release or fetch `number`: its bytes stay live until `end`, in seconds."""

    end: float
    number: int
    nbytes: int
    since: int
    until: int


def _release_places(frame: _Frame, speed: TransferSpeed, spare_bytes: NDArray[np.int64]) -> list[int]:
    """After which run of the frame each value is freed."""
    made: dict[int, list[int]] = {}
    for number, release in enumerate(frame.releases):
        made.setdefault(release.made, []).append(number)

    def begins(position: int) -> list[_Waiting]:
        mine = (frame.releases[number] for number in made.get(position, ()))
        return [
            _Waiting(speed.write_seconds(r.nbytes), number, r.nbytes, r.earliest, r.latest)
            for number, r in zip(made.get(position, ()), mine, strict=True)
        ]

    return _walk(len(frame.releases), frame.seconds, spare_bytes, begins)


def _fetch_places(frame: _Frame, speed: TransferSpeed, spare_bytes: NDArray[np.int64]) -> list[int]:
    """Before which run of the frame each read begins. Mirrored in time, a prefetch with a deadline is a write
    with a release time."""
    size = len(frame.runs)
    needed: dict[int, list[int]] = {}
    for number, fetch in enumerate(frame.fetches):
        needed.setdefault(size - 1 - fetch.latest, []).append(number)

    def begins(position: int) -> list[_Waiting]:
        found = []
        for number in reversed(needed.get(position, [])):
            fetch = frame.fetches[number]
            seconds = speed.read_seconds(fetch.nbytes)
            found.append(_Waiting(seconds, number, fetch.nbytes, position, size - 1 - fetch.earliest))
        return found

    places = _walk(len(frame.fetches), frame.seconds[::-1], spare_bytes[::-1], begins)
    return [size - 1 - place for place in places]


def _walk(
    count: int,
    seconds: Sequence[float],
    spare_bytes: NDArray[np.int64],
    begins: Callable[[int], list[_Waiting]],
) -> list[int]:
    """Keep each value live until its transfer ends, while `spare_bytes` last; takes its bytes from these.

    The answer is for each transfer the last run during which its value is live. Where not all values fit, the
    step waits for the transfers that end first.
    """
    places = [0] * count
    clock = free = 0.0
    waiting: list[_Waiting] = []
    for position, takes in enumerate(seconds):
        if waiting:
            live_bytes = sum(w.nbytes for w in waiting if w.since < position)
            stay: list[_Waiting] = []
            for transfer in waiting:
                if transfer.since >= position:
                    stay.append(transfer)
                elif transfer.end <= clock or live_bytes > spare_bytes[position] or transfer.until < position:
                    clock = max(clock, transfer.end)
                    places[transfer.number] = position - 1
                    live_bytes -= transfer.nbytes
                else:
                    stay.append(transfer)
            waiting = stay
            spare_bytes[position] -= live_bytes
        clock += takes
        for transfer in begins(position):
            free = max(clock, free) + transfer.end
            waiting.append(replace(transfer, end=free))
    for transfer in waiting:
        places[transfer.number] = max(transfer.since, min(transfer.until, len(seconds) - 1))
    return places


def _together(frame: _Frame, releases: Sequence[int], fetches: Sequence[int]) -> tuple[Run, ...]:
    """The whole schedule: releases after, and fetches before the given runs of the frame."""
    behind: dict[int, list[Run]] = {}
    for release, place in zip(frame.releases, releases, strict=True):
        behind.setdefault(place, []).append(Run(release.node))
    before: dict[int, list[Run]] = {}
    for fetch, place in zip(frame.fetches, fetches, strict=True):
        before.setdefault(place, []).append(fetch.run)
    found: list[Run] = []
    for position, run in enumerate(frame.runs):
        found += before.get(position, ())
        found.append(run)
        found += behind.get(position, ())
    return tuple(found)
