"""Plans that round, beside plans that are exact: one step in two forms, and which of two solutions to take.

The form that rounds has other ops, so it is searched as a step of its own. Its solution is told against the
baseline of the exact form, which is what eager PyTorch runs.
"""

from dataclasses import replace

from lowtide.errors import BudgetTooSmall
from lowtide.facts import Solution
from lowtide.planning.planner import Planner

WORTH = 0.01
"""The share of the step's time that rounding has to save where an exact plan fits as well."""

ROUNDS = (
    "rounds ({what}): linear layer and loss run in chunks of rows. Losses and gradients are those of eager "
    "up to rounding, not to the last bit; `lowtide verify` says how far. Pictures "
    "show this form of the step without and with the plan"
)
NOT_USED = "rounds={what} changes nothing here: {reason}"


def beside_exact(solution: Solution, exact: Planner) -> Solution:
    """A solution of the form that rounds, with the baseline of the exact form. Nothing is proven of it."""
    seconds = exact.baseline.seconds
    added = solution.step_seconds + solution.recompute_seconds - seconds
    return replace(
        solution,
        baseline_peak_bytes=exact.eager_peak_bytes,
        step_seconds=seconds,
        recompute_seconds=max(0.0, added),
        lower_bound_seconds=None,
        floor_bound_bytes=None,
    )


def chosen(exact: Solution | None, rounded: Solution | None) -> Solution | None:
    """The exact solution, unless there is none or rounding saves time that is worth it."""
    if exact is None or rounded is None:
        return exact or rounded
    saved = exact.recompute_seconds - rounded.recompute_seconds
    return rounded if saved > WORTH * exact.step_seconds else exact


def lower(one: BudgetTooSmall, other: BudgetTooSmall) -> BudgetTooSmall:
    """Of two refusals, the one with the lower floor."""
    return other if other.floor_bytes < one.floor_bytes else one
