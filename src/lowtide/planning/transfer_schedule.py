"""Where a schedule lets go of offloaded values and begins to read them back, so that transfers hide.

First everything is as small as can be: a value leaves right after its last use in the forward pass, and its
read begins right before its first use in the backward pass. Then values are held longer, and read back
earlier, as far as the budget has room at every run in between and the link needs the time. Forward in time
for the writes; for the reads the same from the end of the step backward in time, where a read that must be
done by a run is a write that begins after it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lowtide.facts import Run, Step, TransferSpeed
from lowtide.planning.simulate import Timeline, recompute_slots, simulate, source_of
from lowtide.planning.transfer_model import is_fetch, last_forward_reads, transfer_bytes, value_of


@dataclass(frozen=True, slots=True)
class _Fetch:
    """A run that reads a value back: before run `latest` of the frame, and not before run `earliest`."""

    run: Run
    earliest: int
    latest: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Release:
    """A movable node: after run `earliest` of the frame, and not after run `latest`. The value was made by
    run `made`."""

    node: int
    made: int
    earliest: int
    latest: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Frame:
    """A schedule without its releases and fetches, and where those may be."""

    runs: tuple[Run, ...]
    seconds: tuple[float, ...]
    releases: tuple[_Release, ...]
    fetches: tuple[_Fetch, ...]


def placed(step: Step, runs: Sequence[Run], *, budget_bytes: int, slack: float = 1.0) -> Timeline:
    """The schedule `runs` with its transfers placed so that they hide as well as the budget allows.

    What it holds is within the budget wherever that is possible without moving anything else. Transfers are
    placed as if they took `slack` times as long, for a link that is not always as fast as it was measured.
    """
    assert step.transfer_speed is not None
    frame = _frame(step, _used_late(step, runs))
    smallest = _together(
        frame, [release.earliest for release in frame.releases], [fetch.latest for fetch in frame.fetches]
    )
    held = simulate(step, smallest).live_bytes
    in_frame = [not (step.nodes[run.rank].movable or is_fetch(step, run)) for run in smallest]
    room = budget_bytes - held[in_frame]
    slow = replace(
        step.transfer_speed,
        write_bytes_per_second=step.transfer_speed.write_bytes_per_second / slack,
        read_bytes_per_second=step.transfer_speed.read_bytes_per_second / slack,
        latency_seconds=step.transfer_speed.latency_seconds * slack,
    )
    releases, fetches = _release_places(frame, slow, room), _fetch_places(frame, slow, room)
    return simulate(step, _together(frame, releases, fetches))


def _used_late(step: Step, runs: Sequence[Run]) -> list[Run]:
    """The same schedule, where what reads a value back, and views of that, run right before their use."""
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
    leaves: list[int] = []
    waiting: dict[int, Run] = {}
    last_read: dict[int, int] = {}
    fetches: list[_Fetch] = []
    first_run: dict[int, int] = {}
    for run in runs:
        if run.is_first and step.nodes[run.rank].movable:
            leaves.append(run.rank)
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
    slots = _slot_starts(step, kept)
    fetches = [
        replace(fetch, earliest=max(fetch.earliest, slots[step.nodes[fetch.run.rank].segment]))
        for fetch in fetches
    ]
    return _Frame(
        runs=tuple(kept),
        seconds=tuple(source_of(step, run).seconds for run in kept),
        releases=_releases(step, [leave for leave in leaves if value_of(step, leave) in fetched], first_run),
        fetches=tuple(fetches),
    )


def _slot_starts(step: Step, runs: Sequence[Run]) -> dict[int, int]:
    """By segment, the first run before which its values may be brought back."""
    slots = recompute_slots(step)
    starts: dict[int, int] = {}
    for position, run in enumerate(runs):
        if run.is_first and slots[run.rank] >= 0:
            starts.setdefault(slots[run.rank], position)
    return starts


def _releases(step: Step, leaves: Sequence[int], first_run: Mapping[int, int]) -> tuple[_Release, ...]:
    last_use = last_forward_reads(step)
    ends: dict[int, int] = {}
    for node in step.nodes[: step.first_backward_rank]:
        if node.rank in first_run and node.op != "output":
            ends[node.segment] = first_run[node.rank]
    found = [
        _Release(
            node=leave,
            made=first_run[value_of(step, leave)],
            earliest=first_run[last_use[leave]],
            latest=ends[step.nodes[leave].segment],
            nbytes=transfer_bytes(step, value_of(step, leave)),
        )
        for leave in leaves
    ]
    return tuple(sorted(found, key=lambda release: (release.made, release.node)))


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A transfer that ends at `end`, and until then takes its bytes; the `number` of a release or fetch."""

    end: float
    number: int
    nbytes: int
    since: int
    until: int


def _release_places(frame: _Frame, link: TransferSpeed, room: NDArray[np.int64]) -> list[int]:
    """After which run of the frame each value is let go."""
    made: dict[int, list[int]] = {}
    for number, release in enumerate(frame.releases):
        made.setdefault(release.made, []).append(number)

    def begins(position: int) -> list[_Waiting]:
        mine = (frame.releases[number] for number in made.get(position, ()))
        return [
            _Waiting(link.write_seconds(r.nbytes), number, r.nbytes, r.earliest, r.latest)
            for number, r in zip(made.get(position, ()), mine, strict=True)
        ]

    return _walk(len(frame.releases), frame.seconds, room, begins)


def _fetch_places(frame: _Frame, link: TransferSpeed, room: NDArray[np.int64]) -> list[int]:
    """Before which run of the frame each read begins: releases in a step that runs from its end."""
    size = len(frame.runs)
    needed: dict[int, list[int]] = {}
    for number, fetch in enumerate(frame.fetches):
        needed.setdefault(size - 1 - fetch.latest, []).append(number)

    def begins(position: int) -> list[_Waiting]:
        found = []
        for number in reversed(needed.get(position, [])):
            fetch = frame.fetches[number]
            seconds = link.read_seconds(fetch.nbytes)
            found.append(_Waiting(seconds, number, fetch.nbytes, position, size - 1 - fetch.earliest))
        return found

    places = _walk(len(frame.fetches), frame.seconds[::-1], room[::-1], begins)
    return [size - 1 - place for place in places]


def _walk(
    count: int,
    seconds: Sequence[float],
    room: NDArray[np.int64],
    begins: Callable[[int], list[_Waiting]],
) -> list[int]:
    """Hold what is on its way until its transfer is done, as long as there is room; takes it from `room`.

    The answer is for each transfer the last run during which its value is held. Where not all fit, those
    whose transfers end first are waited for.
    """
    places = [0] * count
    clock = free = 0.0
    waiting: list[_Waiting] = []
    for position, takes in enumerate(seconds):
        if waiting:
            held = sum(w.nbytes for w in waiting if w.since < position)
            stay: list[_Waiting] = []
            for transfer in waiting:
                if transfer.since >= position:
                    stay.append(transfer)
                elif transfer.end <= clock or held > room[position] or transfer.until < position:
                    clock = max(clock, transfer.end)
                    places[transfer.number] = position - 1
                    held -= transfer.nbytes
                else:
                    stay.append(transfer)
            waiting = stay
            room[position] -= held
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
