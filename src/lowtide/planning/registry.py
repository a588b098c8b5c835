"""The planners by name: the built-in ones, and those that installed packages register.

A planner is a function `(problem: PlanningProblem, budget_bytes: int) -> Answer`. The answer is one of

- a `RematSet`, such as `problem.retaining(storages)` makes: a set of (slot, remat number) of `problem.table`;
- a schedule: a sequence of `facts.Run`, all runs of the step in order;
- a `Timeline`, such as `problem.timeline(remats)` makes: the schedule that was simulated.

Where a planner finds no schedule within the budget, it answers the one with the lowest peak that it knows:
the error for the user names that peak. The simulator checks every answer.

A package registers its planners in the entry-point group `lowtide.planners`:

    [project.entry-points."lowtide.planners"]
    largest-first = "my_planner:largest_first"

Listing names loads no planner, and imports neither numpy nor torch. A registered planner is loaded when its
name is asked for, and only then. `auto` starts from built-in planners, never from a registered one.
"""

from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, TypeAlias

from lowtide.errors import LowtideError

if TYPE_CHECKING:
    from lowtide.facts import Run
    from lowtide.planning.planning_problem import PlanningProblem
    from lowtide.planning.search.table import RematSet
    from lowtide.planning.simulate import Timeline

    Answer: TypeAlias = RematSet | Sequence[Run] | Timeline
    PlannerFunction: TypeAlias = Callable[[PlanningProblem, int], Answer]

GROUP = "lowtide.planners"

BUILT_IN = {
    "auto": "lowtide.planning.variants:auto",
    "mu-two": "lowtide.planning.mu_two:mu_two",
    "none": "lowtide.planning.baselines:retain_all",
    "all": "lowtide.planning.baselines:retain_none",
    "every-block": "lowtide.planning.baselines:every_block",
    "sqrt": "lowtide.planning.baselines:square_root",
}
"""By name, where the planner is; `none` recomputes nothing, `all` whatever can be."""


def planner_names() -> tuple[str, ...]:
    """All names that a user can choose: built-in planners first, then the registered ones by name."""
    return (*BUILT_IN, *sorted({entry.name for entry in entry_points(group=GROUP)}.difference(BUILT_IN)))


def load_planner(name: str) -> "PlannerFunction":
    """The function of that name; LowtideError where there is none, or where it cannot be loaded."""
    entry = _entry(name)
    try:
        planner: PlannerFunction = entry.load()
    except Exception as error:
        raise LowtideError(
            f"planner '{name}' ({entry.value}) cannot be loaded: {_in_words(error)}"
        ) from error
    if not callable(planner):
        raise LowtideError(f"planner '{name}' ({entry.value}) is no function of a problem and a budget")
    return planner


def call_planner(name: str, problem: "PlanningProblem", budget_bytes: int) -> "Timeline":
    """The answer of a planner as the simulator sees it; LowtideError where the answer is no schedule."""
    planner = load_planner(name)
    if name in BUILT_IN:
        return problem.checked(planner(problem, budget_bytes), budget_bytes=budget_bytes)
    try:
        answer = planner(problem, budget_bytes)
    except LowtideError:
        raise
    except Exception as error:
        raise LowtideError(f"planner '{name}' failed: {_in_words(error)}") from error
    try:
        return problem.checked(answer, budget_bytes=budget_bytes, trusted=False)
    except (TypeError, ValueError) as error:
        raise LowtideError(f"planner '{name}' gave an answer that cannot run: {error}") from error


def _entry(name: str) -> EntryPoint:
    if name in BUILT_IN:
        return EntryPoint(name, BUILT_IN[name], GROUP)
    found = sorted({entry.value: entry for entry in entry_points(group=GROUP, name=name)}.items())
    if not found:
        raise LowtideError(f"there is no planner '{name}': choose one of {', '.join(planner_names())}")
    if len(found) > 1:
        raise LowtideError(
            f"several packages register a planner '{name}' ({', '.join(value for value, _ in found)}): "
            "uninstall all but one"
        )
    return found[0][1]


def _in_words(error: Exception) -> str:
    """One line, whatever the error says."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
