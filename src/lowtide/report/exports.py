"""Files for other programs: CSV tables, and a Chrome trace for Perfetto (https://ui.perfetto.dev).

CSV: fixed columns first, further ones after them. Unknown values are empty cells. Columns never move or
vanish, so scripts may rely on their order. Bytes and seconds are plain numbers. Figures for
another device than the CPU have a last column `device` with its name.

Trace: every timeline is a process. Ops are trace events, in one thread per region and one for recompute. Live
bytes are counters, one per kind and one for the total. Where values are offloaded, each direction of transfer
has a thread, and stalls have one. Times are profiled, bytes simulated.
"""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lowtide.facts import Action, Activation, Decision, Node, Step
from lowtide.facts.files import write_atomic
from lowtide.planning.simulate import Timeline
from lowtide.report import times
from lowtide.report.results import CompareRow, PlannerCurve, SweepRow, TradeoffPoint
from lowtide.report.style import LABELS, STACK
from lowtide.report.times import READ, WAIT, WRITE, StoreUse, direction_of, run_waits, traffic_of

Cell = str | int | float | None

NODE_COLUMNS = (
    "rank", "node_name", "node_type", "gtype", "median_run_time_s", "median_peak_mem_bytes",
    "median_active_mem_bytes", "device", "op", "module", "source", "segment", "made_bytes",
    "workspace_bytes", "recompute_how", "fixed_because", "time_estimated",
)  # fmt: skip
ACTIVATION_COLUMNS = (
    "activation_name", "creation_rank", "last_fw_use_rank", "first_bw_use_rank", "last_bw_use_rank",
    "median_mem_size_bytes", "inactive_time_s", "swap_time_s", "recomp_time_s", "recomp_memory_bytes",
    "recompute_ratio", "module", "source", "recomp_srcs", "recomp_graph", "fixed_because",
)  # fmt: skip
DECISION_COLUMNS = (
    "activation_name", "decision", "median_mem_size_bytes", "recomp_time_s", "creation_rank",
    "first_bw_use_rank", "last_fw_use_rank", "last_bw_use_rank", "module", "how", "recomp_cnt",
    "plan_recomp_time_s", "reason",
)  # fmt: skip
OFFLOAD_COLUMNS = ("released_after", "fetched_before")
TRANSFER_COLUMNS = (
    "activation_name", "direction", "bytes", "begin_s", "end_s", "hidden_s", "not_hidden_s",
)  # fmt: skip
SWEEP_COLUMNS = (
    "batch_size", "status", "budget_bytes", "baseline_predicted_peak_bytes", "baseline_measured_peak_bytes",
    "planned_predicted_peak_bytes", "planned_measured_peak_bytes", "reduction", "baseline_median_s",
    "baseline_spread_s", "planned_median_s", "planned_spread_s", "overhead", "exact", "predicted_overhead",
    "noise",
)  # fmt: skip
COMPARE_COLUMNS = ("method", "peak_bytes", "time_ratio", "verdict", "noise")
TRADEOFF_COLUMNS = (
    "peak_bytes", "recompute_s", "overhead", "num_recomputed", "measured_peak_bytes", "measured_overhead",
    "measured_noise", "lower_bound_s",
)  # fmt: skip
TRADEOFF_OFFLOAD_COLUMNS = ("num_offloaded",)


def write_node_stats(path: Path, step: Step, timeline: Timeline) -> Path:
    """`node_stats.csv`: one row per node of the baseline.

    Peak memory is every live byte while the node runs (`timeline` of the baseline); active memory is the
    node's own share: its reads, its result and its workspace.
    """
    rows = (
        (
            node.rank, node.name, node.kind, node.region, node.seconds, live, active_bytes(step, node),
            step.device, node.op, node.module, node.source, node.segment,
            sum(step.storages[made].nbytes for made in node.makes), node.workspace_bytes,
            " ".join(remat.rule for remat in node.remats), node.fixed, _flag(node.estimated),
        )
        for node, live in zip(
            (step.nodes[run.rank] for run in timeline.runs), timeline.live_bytes.tolist(), strict=True
        )
    )  # fmt: skip
    return _write(path, NODE_COLUMNS, rows)


def active_bytes(step: Step, node: Node) -> int:
    """Bytes of the storages that a node reads or holds, each counted once, and its workspace."""
    touched = set(node.holds).union(*(step.nodes[rank].holds for rank in node.reads))
    return sum(step.storages[storage].nbytes for storage in sorted(touched)) + node.workspace_bytes


def write_activation_stats(path: Path, activations: Sequence[Activation], *, device: str = "cpu") -> Path:
    """`activation_stats.csv`: one row per activation; lists are joined by spaces."""
    rows = (
        (
            a.name, a.creation_rank, a.last_forward_use, a.first_backward_use, a.last_backward_use,
            a.nbytes, a.inactive_seconds, a.offload_seconds, a.recompute_seconds, a.recompute_bytes,
            a.recompute_ratio, a.module, a.source, " ".join(a.recompute_sources),
            " ".join(a.recompute_nodes), a.fixed,
        )
        for a in activations
    )  # fmt: skip
    return _write(path, ACTIVATION_COLUMNS, rows, device=device)


def write_decisions(path: Path, decisions: Sequence[Decision], *, device: str = "cpu") -> Path:
    """`ac_decisions.csv`: one row per activation. `recomp_time_s`: the time of one recompute;
    `plan_recomp_time_s`: the time that this plan spends on it. Where the plan offloads, two more columns name
    the nodes between which the value is only in the store."""
    offloads = any(d.action is Action.OFFLOAD for d in decisions)
    rows = (
        (
            d.name, d.action, d.nbytes, d.recompute_seconds, d.creation_rank, d.first_backward_use,
            d.last_forward_use, d.last_backward_use, d.module, d.method, d.times, d.seconds, d.reason,
            *((d.released_after, d.fetched_before) if offloads else ()),
        )
        for d in decisions
    )  # fmt: skip
    columns = (*DECISION_COLUMNS, *(OFFLOAD_COLUMNS if offloads else ()))
    return _write(path, columns, rows, device=device)


def write_transfers(path: Path, use: StoreUse, *, device: str = "cpu") -> Path:
    """`transfers.csv`: one row per transfer, in the order they begin."""
    rows = (
        (
            move.name, move.direction, move.nbytes, move.begin_seconds, move.end_seconds,
            max(0.0, move.end_seconds - move.begin_seconds - move.stall_seconds), move.stall_seconds,
        )
        for move in use.moves
    )  # fmt: skip
    return _write(path, TRANSFER_COLUMNS, rows, device=device)


def write_sweep(path: Path, rows: Sequence[SweepRow], *, device: str = "cpu") -> Path:
    """`sweep.csv`: one row per batch size; reduction, overhead and noise are fractions."""
    cells = (
        (
            row.batch_size, row.status_text, row.budget_bytes,
            row.baseline.predicted_peak_bytes, row.baseline.measured_peak_bytes,
            row.planned.predicted_peak_bytes, row.planned.measured_peak_bytes, row.reduction,
            row.baseline.seconds_median, row.baseline.seconds_spread,
            row.planned.seconds_median, row.planned.seconds_spread, row.overhead, _flag(row.exact),
            row.predicted_overhead, row.noise,
        )
        for row in rows
    )  # fmt: skip
    return _write(path, SWEEP_COLUMNS, cells, device=device)


def write_compare(path: Path, rows: Sequence[CompareRow], *, device: str = "cpu") -> Path:
    """`compare.csv`: one row per method."""
    cells = ((row.method, row.peak_bytes, row.time_ratio, row.verdict_text, row.noise) for row in rows)
    return _write(path, COMPARE_COLUMNS, cells, device=device)


def write_tradeoff(
    path: Path, points: Sequence[TradeoffPoint], *, step_seconds: float, device: str = "cpu"
) -> Path:
    """`tradeoff.csv`: one row per plan; `overhead` is recompute time over the baseline's time. Where a
    plan offloads, a last column counts the offloaded values."""
    offloads = any(point.offloaded for point in points)
    cells = (
        (
            point.peak_bytes, point.recompute_seconds,
            point.recompute_seconds / step_seconds if step_seconds else None,
            len(point.recomputed), point.measured_peak_bytes, point.measured_overhead,
            point.measured_noise, point.lower_bound_seconds,
            *((len(point.offloaded),) if offloads else ()),
        )
        for point in points
    )  # fmt: skip
    columns = (*TRADEOFF_COLUMNS, *(TRADEOFF_OFFLOAD_COLUMNS if offloads else ()))
    return _write(path, columns, cells, device=device)


def write_planner_curves(
    path: Path, curves: Sequence[PlannerCurve], *, step_seconds: float, device: str = "cpu"
) -> Path:
    """`planners.csv`: one row per plan of each planner, with the columns of `tradeoff.csv`."""
    cells = (
        (
            curve.planner, point.peak_bytes, point.recompute_seconds,
            point.recompute_seconds / step_seconds if step_seconds else None,
            len(point.recomputed), point.measured_peak_bytes, point.measured_overhead,
            point.measured_noise, point.lower_bound_seconds,
        )
        for curve in curves
        for point in curve.points
    )  # fmt: skip
    return _write(path, ("planner", *TRADEOFF_COLUMNS), cells, device=device)


def _write(
    path: Path, columns: Sequence[str], rows: Iterable[Sequence[Cell]], *, device: str = "cpu"
) -> Path:
    named = device != "cpu"
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*columns, *(["device"] if named else [])])
    for row in rows:
        writer.writerow([*map(_cell, row), *([device] if named else [])])
    return write_atomic(path, text.getvalue())


def _cell(value: Cell) -> str:
    if value is None:
        return ""
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _flag(value: bool | None) -> str | None:
    return None if value is None else str(value).lower()


_MICROSECONDS = 1e6
_SHORTEST = 1e-9
"""The least seconds of a trace event: Perfetto stacks events of no length."""


def chrome_trace(step: Step, timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """The trace as an object for `json.dump`; `timelines` by the name of their process."""
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
    """A thread for each part of the step; a thread with its process's number would be the main thread."""
    link = () if traffic_of(timeline) is None else (WAIT, WRITE, READ)
    return {str(part): 10 * pid + index for index, part in enumerate((*times.PARTS, *link))}


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _events(step: Step, timeline: Timeline, pid: int) -> list[dict[str, Any]]:
    threads = _threads(pid, timeline)
    waits = run_waits(timeline)
    live = {LABELS[kind]: timeline.bytes_by_kind[kind].tolist() for kind in STACK}
    live["total"] = timeline.live_bytes.tolist()
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
        args = {"op": node.op, "rank": node.rank, "position": position, "bytes held": live["total"][position]}
        args |= {key: value for key, value in (("module", node.module), ("source", node.source)) if value}
        place = (pid, threads[run.part])
        events.append(_slice(node.name, run.part, place=place, span=(begin, now), args=args))
        for label, values in live.items():
            # a counter keeps its value until the next event: only changes are written
            if shown.get(label) != values[position]:
                shown[label] = values[position]
                events.append(_counter(label, pid, round(begin * _MICROSECONDS, 3), values[position]))
    events += _transfers(step, timeline, pid, threads)
    end = round(now * _MICROSECONDS, 3)
    events += [_counter(label, pid, end, shown.get(label, 0)) for label in live]
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
