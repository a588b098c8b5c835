"""A Chrome trace of one or more ways to run a step; open it in Perfetto (https://ui.perfetto.dev).

Every way is a process of its own. Ops are slices, one thread per region and one for recompute; bytes
held are counters, one per kind and one for the total. Where values are offloaded, each direction of the link
has a thread of its own, and so has the waiting for it. Times are profiled, bytes simulated.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowtide.facts import Step
from lowtide.facts.files import write_atomic
from lowtide.planning.simulate import Timeline
from lowtide.report import times
from lowtide.report.style import LABELS, STACK
from lowtide.report.transfers import READ, WAIT, WRITE, direction_of, run_waits, traffic_of

_MICROSECONDS = 1e6
_SHORTEST = 1e-9
"""Seconds that every slice lasts at least: Perfetto stacks those that last no time below each other."""


def chrome_trace(step: Step, timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """The trace as an object for `json.dump`; `timelines` by the name their process shall have."""
    events: list[dict[str, Any]] = []
    for pid, (name, timeline) in enumerate(timelines.items(), start=1):
        events += _names(pid, name, timeline)
        events += _events(step, timeline, pid)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "made by": "lowtide",
            "fingerprint": step.fingerprint,
            "times": "profiled",
            "bytes": "simulated",
        },
    }


def write_trace(path: Path, step: Step, timelines: Mapping[str, Timeline]) -> Path:
    """Write the trace as JSON."""
    return write_atomic(
        path, json.dumps(chrome_trace(step, timelines), separators=(",", ":"), allow_nan=False)
    )


def _names(pid: int, name: str, timeline: Timeline) -> list[dict[str, Any]]:
    events = [
        _metadata("process_name", pid, 0, {"name": name}),
        _metadata("process_sort_index", pid, 0, {"sort_index": pid}),
    ]
    for part, tid in _threads(pid, timeline).items():
        events.append(_metadata("thread_name", pid, tid, {"name": part}))
        events.append(_metadata("thread_sort_index", pid, tid, {"sort_index": tid}))
    return events


def _threads(pid: int, timeline: Timeline) -> dict[str, int]:
    """A thread for each part of the step; one with its process's number would be shown as the main thread."""
    link = () if traffic_of(timeline) is None else (WAIT, WRITE, READ)
    return {str(part): 10 * pid + index for index, part in enumerate((*times.PARTS, *link))}


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _events(step: Step, timeline: Timeline, pid: int) -> list[dict[str, Any]]:
    threads = _threads(pid, timeline)
    waits = run_waits(timeline)
    held = {LABELS[kind]: timeline.bytes_by_kind[kind].tolist() for kind in STACK}
    held["total"] = timeline.bytes_held.tolist()
    events: list[dict[str, Any]] = []
    shown: dict[str, int] = {}
    now = 0.0
    for position, run in enumerate(times.timed(step, timeline.runs)):
        if waits[position]:
            name = f"before {run.node.name}"
            place = (pid, threads[WAIT])
            events.append(_slice(name, WAIT, place=place, span=(now, now + waits[position])))
            now += waits[position]
        begin = now
        now += max(run.seconds, _SHORTEST)
        node = run.node
        args = {"op": node.op, "rank": node.rank, "position": position, "bytes held": held["total"][position]}
        args |= {key: value for key, value in (("module", node.module), ("source", node.source)) if value}
        place = (pid, threads[run.part])
        events.append(_slice(node.name, run.part, place=place, span=(begin, now), args=args))
        for label, values in held.items():
            # A counter keeps its value until the next event, so only changes are written.
            if shown.get(label) != values[position]:
                shown[label] = values[position]
                events.append(_counter(label, pid, round(begin * _MICROSECONDS, 3), values[position]))
    events += _transfers(step, timeline, pid, threads)
    end = round(now * _MICROSECONDS, 3)
    events += [_counter(label, pid, end, shown.get(label, 0)) for label in held]
    return events


def _transfers(step: Step, timeline: Timeline, pid: int, threads: Mapping[str, int]) -> list[dict[str, Any]]:
    traffic = traffic_of(timeline)
    if traffic is None:
        return []
    return [
        _slice(
            step.nodes[transfer.node].name,
            direction_of(transfer),
            place=(pid, threads[direction_of(transfer)]),
            span=(transfer.begin_seconds, transfer.end_seconds),
            args={"bytes": transfer.nbytes, "waited for (s)": transfer.stall_seconds},
        )
        for transfer in traffic.transfers
    ]


def _slice(
    name: str,
    category: str,
    *,
    place: tuple[int, int],
    span: tuple[float, float],
    args: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """`place` is a process and a thread, `span` the seconds from and to."""
    start, end = (round(seconds * _MICROSECONDS, 3) for seconds in span)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": place[0],
        "tid": place[1],
        "ts": start,
        "dur": round(end - start, 3),
        "args": args or {},
    }


def _counter(label: str, pid: int, timestamp: float, nbytes: int) -> dict[str, Any]:
    return {"ph": "C", "name": f"memory: {label}", "pid": pid, "ts": timestamp, "args": {"bytes": nbytes}}
