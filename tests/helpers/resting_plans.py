"""Plans whose weights rest on the store, for weights that a test chooses."""

from collections.abc import Iterable
from dataclasses import replace

import lowtide
from lowtide.facts import Step
from lowtide.planning.repeated_graphs import planner_for
from lowtide.planning.resting_weights import restable_weights, with_resting_weights


def resting_form(
    found: lowtide.Profile, resting: Iterable[str] | None = None
) -> tuple[Step, tuple[str, ...]]:
    """The step in which the weights `resting` rest, by default all that may."""
    names = tuple(restable_weights(found.step) if resting is None else resting)
    return with_resting_weights(found.step, names), names


def resting_plan(
    found: lowtide.Profile, resting: Iterable[str] | None = None, *, budget_bytes: int | None = None
) -> lowtide.Plan:
    """The plan of `auto` with these weights at rest, by default at its floor."""
    form, names = resting_form(found, resting)
    planner = planner_for(form)
    budget_bytes = planner.floor_bytes if budget_bytes is None else budget_bytes
    solution = replace(planner.solve(budget_bytes=budget_bytes), resting=names)
    known = None if found.known is None else found.known.without_runs()
    return lowtide.Plan(solution, known=known, loop=found.loop, traced=found.traced, step=form)
