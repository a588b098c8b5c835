"""Everything a report can show, made up around `report_steps.residual_step`."""

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from offloadable import with_offload
from report_steps import MIB, residual_step
from synthetic import chain

from lowtide.facts import Action, Activation, Decision, Run, Schedule, Solution, Step, TransferSpeed
from lowtide.planning.activations import activations
from lowtide.planning.repeated_graphs import planner_for
from lowtide.planning.simulate import Timeline, baseline_runs, simulate
from lowtide.planning.variants import offload_alone
from lowtide.report.results import (
    CompareRow,
    Environment,
    Measurement,
    Results,
    StepMeasurement,
    SweepRow,
    SweepStatus,
    TradeoffPoint,
)


@dataclass(frozen=True)
class Case:
    """One step with its plan and everything else a `run` shows."""

    step: Step
    before: Timeline
    after: Timeline
    solution: Solution
    activations: tuple[Activation, ...]
    measurement: Measurement
    tradeoff: tuple[TradeoffPoint, ...]


def make_case(num_layers: int = 12, *, num_points: int = 20, **names: str) -> Case:
    step = residual_step(num_layers, **names)
    before = simulate(step, baseline_runs(step))
    after = simulate(step, relu_schedule(step))
    solution = solution_of(step, before=before, after=after)
    return Case(
        step=step,
        before=before,
        after=after,
        solution=solution,
        activations=activations(step),
        measurement=measurement_of(solution),
        tradeoff=tradeoff_of(step, solution, num_points),
    )


def store_case() -> dict[str, Any]:
    """A step, its baseline timeline, a solution that waits for its store, and its timeline."""
    link = TransferSpeed(store="disk:/scratch", write_bytes_per_second=1e9, read_bytes_per_second=1e9)
    step = with_offload(chain(length=8, nbytes=MIB), link)
    planner = planner_for(step)
    lowest = planner.problem.once(offload_alone).entries[0]
    after = simulate(step, lowest.runs)
    solution = planner.solution_of("auto", after, lowest.peak_bytes)
    assert solution.offload is not None
    assert 0 < solution.offload.stall_seconds < solution.offload.transfer_seconds
    return {"step": step, "before": planner.baseline, "after": after, "solution": solution}


def relu_schedule(step: Step) -> tuple[Run, ...]:
    """An order that runs every relu but the last again, and its batch norm, before its backward op."""
    relus = [n.rank for n in step.nodes if n.op == "aten.relu.default"][:-1]
    readers = {rank: n.rank for n in reversed(step.nodes[step.first_backward_rank :]) for rank in n.reads}
    again: dict[int, list[Run]] = {}
    for relu in relus:
        getitem = step.nodes[relu].reads[0]
        chain = (step.nodes[getitem].reads[0], getitem, relu)
        again.setdefault(readers[relu], []).extend(Run(r, step.nodes[r].remats[0].rule) for r in chain)
    return tuple(run for node in step.nodes for run in (*again.get(node.rank, ()), Run(node.rank)))


def solution_of(step: Step, *, before: Timeline, after: Timeline, slack: float = 1.05) -> Solution:
    """The plan that ran the relus again, for a budget of `slack` times its peak."""
    relus = {rank for rank in after.order if step.nodes[rank].op == "aten.relu.default"}
    last = max(relus)
    return Solution(
        planner="auto",
        fingerprint=step.fingerprint,
        budget_bytes=int(after.peak_bytes * slack),
        peak_bytes=after.peak_bytes,
        peak_node=after.peak_node,
        baseline_peak_bytes=before.peak_bytes,
        floor_bytes=after.peak_bytes // 2,
        step_seconds=step.seconds,
        recompute_seconds=after.added_seconds,
        decisions=tuple(
            _decision(activation, activation.creation_rank in relus and activation.creation_rank != last)
            for activation in activations(step)
        ),
        schedule=Schedule(runs=after.runs),
    )


def _decision(activation: Activation, again: bool) -> Decision:
    return Decision(
        name=activation.name,
        module=activation.module,
        action=Action.RECOMPUTE if again else Action.RETAINED,
        nbytes=activation.nbytes,
        held_bytes=0 if again else activation.nbytes,
        seconds=activation.recompute_seconds if again else 0.0,
        times=int(again),
        method="again" if again else "",
        creation_rank=activation.creation_rank,
        last_forward_use=activation.last_forward_use,
        first_backward_use=activation.first_backward_use,
        last_backward_use=activation.last_backward_use,
        recompute_seconds=activation.recompute_seconds,
        reason="idle across the peak, and cheap to make again for its size"
        if again
        else "cheaper activations already bring the peak below the budget",
    )


def tradeoff_of(step: Step, solution: Solution, num_points: int = 20) -> tuple[TradeoffPoint, ...]:
    """A curve that recomputes one more share of the activations at every point."""
    names = [d.name for d in sorted(solution.decisions, key=lambda d: (-d.nbytes, d.name))]
    points = []
    for index in range(num_points):
        share = index / max(1, num_points - 1)
        points.append(
            TradeoffPoint(
                peak_bytes=int(solution.baseline_peak_bytes * (1 - 0.6 * share)),
                recompute_seconds=step.seconds * 0.3 * share**2,
                recomputed=tuple(names[: int(share * 0.8 * len(names))]),
                measured_peak_bytes=int(solution.baseline_peak_bytes * (1 - 0.6 * share) * 1.004)
                if index % 5 == 0
                else None,
                measured_overhead=0.3 * share**2 + 0.01 if index % 5 == 0 else None,
            )
        )
    return tuple(points)


def measurement_of(solution: Solution, *, exact: bool = True) -> Measurement:
    return Measurement(
        baseline=StepMeasurement(
            predicted_peak_bytes=solution.baseline_peak_bytes,
            measured_peak_bytes=int(solution.baseline_peak_bytes * 1.003),
            seconds_median=solution.step_seconds * 1.1,
            seconds_spread=0.02,
        ),
        planned=StepMeasurement(
            predicted_peak_bytes=solution.peak_bytes,
            measured_peak_bytes=int(solution.peak_bytes * 1.002),
            seconds_median=solution.step_seconds * 1.1 + solution.recompute_seconds,
            seconds_spread=0.03,
        ),
        exact=exact,
        differences=() if exact else ("gradient of encoder.stages.0.layers.1.conv.weight", "loss"),
        method="fresh process, torch.profiler memory events; 9 interleaved steps after 2 to warm up",
    )


ENVIRONMENT = Environment(
    command="lowtide run resnet152 --batch-size 4 --budget 60% -o out",
    date="2026-01-31 12:00 UTC",
    machine="x86-64, 2 cores, 7.8 GiB",
    versions=(("lowtide", "0.2.0"), ("torch", "2.13.0"), ("python", "3.11.2")),
)


def sweep_rows() -> tuple[SweepRow, ...]:
    rows = []
    for batch_size, before in ((4, 1449.6), (8, 2128.6), (16, 3466.0), (32, 6191.1)):
        measured = batch_size < 32
        rows.append(
            SweepRow(
                batch_size=batch_size,
                budget_bytes=2400 * MIB,
                baseline=StepMeasurement(
                    predicted_peak_bytes=int(before * MIB),
                    measured_peak_bytes=int(before * 1.003 * MIB) if measured else None,
                    seconds_median=0.4 * batch_size if measured else None,
                    seconds_spread=0.02 * batch_size if measured else None,
                ),
                planned=StepMeasurement(
                    predicted_peak_bytes=int(before * 0.62 * MIB),
                    measured_peak_bytes=int(before * 0.622 * MIB) if measured else None,
                    seconds_median=0.43 * batch_size if measured else None,
                    seconds_spread=0.03 * batch_size if measured else None,
                ),
                exact=True if measured else None,
                status=SweepStatus.MEASURED if measured else SweepStatus.PREDICTED,
            )
        )
    failed = SweepRow(
        batch_size=64,
        budget_bytes=2400 * MIB,
        baseline=StepMeasurement(predicted_peak_bytes=11682 * MIB),
        planned=StepMeasurement(),
        status=SweepStatus.FAILED,
        why="cannot fit in 2.3 GiB, the lowest reachable peak is 3.1 GiB",
    )
    return (*rows, failed)


def compare_rows() -> tuple[CompareRow, ...]:
    return (
        CompareRow(method="none", peak_bytes=1776 * MIB, time_ratio=1.0, verdict=Results.EXACT),
        CompareRow(
            method="checkpoint per block", peak_bytes=489 * MIB, time_ratio=1.34, verdict=Results.EXACT
        ),
        CompareRow(
            method="partitioner 0.5",
            peak_bytes=1007 * MIB,
            time_ratio=1.1,
            verdict=Results.WRONG,
            why="72 of 73 gradients",
        ),
        CompareRow(method="budget 0.0", verdict=Results.CRASHED, why="RuntimeError: no <decomposition>"),
        CompareRow(method="auto", peak_bytes=430 * MIB, time_ratio=1.12, verdict=Results.EXACT),
    )


def tradeoff_points(solutions: Iterable[Solution]) -> list[TradeoffPoint]:
    """The points of a curve, by falling peak. Budgets that gave the same plan give one point."""
    points = {
        (solution.peak_bytes, solution.recompute_seconds): TradeoffPoint(
            peak_bytes=solution.peak_bytes,
            recompute_seconds=solution.recompute_seconds,
            recomputed=tuple(d.name for d in solution.decisions if d.action is Action.RECOMPUTE),
            offloaded=tuple(d.name for d in solution.decisions if d.action is Action.OFFLOAD),
            lower_bound_seconds=solution.lower_bound_seconds,
        )
        for solution in solutions
    }
    return sorted(points.values(), key=lambda point: (-point.peak_bytes, point.recompute_seconds))


def unpack(text: str) -> list[int]:
    """What `templates/decode.js` does."""
    values, previous, rest, scale = [], 0, 0, 1
    for byte in base64.b64decode(text):
        rest += (byte & 127) * scale
        scale *= 128
        if byte < 128:
            previous += -(rest + 1) // 2 if rest % 2 else rest // 2
            values.append(previous)
            rest, scale = 0, 1
    return values
