"""Plans that no planner would make, to see one remat rule at work."""

from dataclasses import replace

import lowtide
from lowtide.facts import Schedule
from lowtide.planning.planner import Planner
from lowtide.planning.schedules import graph_schedules


def by_hand(found: lowtide.Profile, rule: str) -> lowtide.Plan:
    """The plan that rematerializes by `rule` every value that can be, before its first backward read."""
    planner = Planner(found.step)
    table = planner.table
    reruns = set()
    for number, op in enumerate(table.remats):
        if op.rule == rule:
            ((storage, _, _),) = op.fresh
            slot = table.uses[storage].backward[0]
            views = [node.rank for node in found.nodes if storage in node.holds and node.remats]
            reruns |= {(slot, number), *((slot, table.again[rank][0]) for rank in views if rank != op.rank)}
    timeline = planner.timeline(frozenset(reruns))
    return lowtide.Plan(
        replace(
            found.plan("1GB", planner="none").solution,
            peak_bytes=timeline.peak_bytes,
            schedule=Schedule(runs=timeline.runs),
            graphs=graph_schedules(found.step, timeline.runs),
        )
    )
