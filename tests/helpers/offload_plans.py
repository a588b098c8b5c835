"""Plans by hand that offload every value that can be, released and prefetched where a test says."""

from dataclasses import replace

from plans_by_hand import by_hand

import lowtide
from lowtide.facts import Offload, Region, Run, Schedule, Step
from lowtide.planning.schedules import graph_schedules
from lowtide.planning.simulate import recompute_slots, simulate
from lowtide.planning.transfer_model import last_forward_reads, with_releases


def offload_plan(found: lowtide.Profile, *, delay: int = 0, ahead: int = 0) -> lowtide.Plan:
    """Every value is released `delay` ops after its last forward read, and fetched `ahead` ops before its
    first backward read."""
    step = found.step
    assert step.transfer_speed is not None
    solution = by_hand(found, "swap").solution
    runs = with_releases(step, solution.schedule.runs, _later(step, delay))
    runs = _fetched_earlier(step, runs, ahead)
    timeline = simulate(step, runs)
    assert timeline.traffic is not None
    offload = Offload(
        transfer_speed=step.transfer_speed,
        store_bytes=timeline.traffic.store_bytes,
        transfer_seconds=timeline.traffic.transfer_seconds,
        stall_seconds=timeline.traffic.stall_seconds,
    )
    changed = replace(
        solution,
        budget_bytes=timeline.peak_bytes,
        peak_bytes=timeline.peak_bytes,
        schedule=Schedule(runs=runs),
        graphs=graph_schedules(step, runs),
        offload=offload,
        eager=False,
    )
    return lowtide.Plan(changed, known=found.known, loop=found.loop)


def _later(step: Step, delay: int) -> dict[int, int]:
    places = {}
    for leave, after in last_forward_reads(step).items():
        ops = [
            node.rank
            for node in step.nodes[after:]
            if node.region is Region.FORWARD
            and node.segment == step.nodes[leave].segment
            and not node.on_demand
            and node.op != "output"
        ]
        places[leave] = ops[min(delay, len(ops) - 1)]
    return places


def _fetched_earlier(step: Step, runs: tuple[Run, ...], ahead: int) -> tuple[Run, ...]:
    slots = recompute_slots(step)
    moved = list(runs)
    for run in [run for run in runs if run.rule == "swap"]:
        place = moved.index(run)
        del moved[place]
        for _ in range(ahead):
            before = [i for i in range(place) if moved[i].is_first][-1]
            if slots[moved[before].rank] != step.nodes[run.rank].segment:
                break
            place = before
        moved.insert(place, run)
    return tuple(moved)
