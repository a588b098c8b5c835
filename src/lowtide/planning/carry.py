"""Take a schedule over to a step of the same ops with other sizes, and mend it where it does not fit."""

from collections.abc import Sequence

from lowtide.facts import Run
from lowtide.planning.search.descent import descend, trim
from lowtide.planning.search.runs import Rerun, Runs
from lowtide.planning.search.table import Table

MAX_MOVES = 400
"""Evictions to mend a plan: where more are needed, another plan is the better start."""


def carried(table: Table, runs: Sequence[Run], *, budget_bytes: int) -> frozenset[Rerun] | None:
    """The plan that `runs` follow, changed so that it fits and recomputes nothing needlessly; None where
    that takes a search of its own."""
    state = Runs(table)
    state.go_to(plan_of_runs(table, runs))
    if state.peak_bytes() > budget_bytes and not descend(state, budget_bytes, max_moves=MAX_MOVES):
        return None
    trim(state, budget_bytes)
    return state.plan()


def plan_of_runs(table: Table, runs: Sequence[Run]) -> frozenset[Rerun]:
    """What `runs` bring back, each before the first run that comes next."""
    numbers = {(op.rank, op.method): number for number, op in enumerate(table.recipes)}
    plan: set[Rerun] = set()
    slot = table.size
    for run in reversed(runs):
        if run.is_first:
            slot = run.node
        else:
            plan.add((slot, numbers[run.node, run.method]))
    return frozenset(plan)
