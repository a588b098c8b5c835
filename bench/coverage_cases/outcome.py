"""A row of the coverage table."""

from dataclasses import dataclass

GOOD = "exact, within the budget"
OVER = "exact, over the budget"
OUTCOMES = (
    GOOD,
    OVER,
    "differs",
    "refused",
    "failed",
    "timeout",
    "does not repeat in eager",
    "does not train eagerly",
)


@dataclass(slots=True)
class Outcome:
    """What became of a case. Numbers are 0 where it did not get so far."""

    case: str
    group: str
    outcome: str
    words: str = ""
    over_bytes: int = 0
    budget_bytes: int = 0
    peak_bytes: int = 0
    eager_peak_bytes: int = 0
    first_steps_seconds: float = 0.0
    num_nodes: int = 0
    num_graphs: int = 0
    breaks: str = ""
    day: str = ""
    """When it was run, and so with which state of the code."""
