"""The input of every planner: one step, and the answers about it that need no search."""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar, cast

from lowtide.facts import Activation, Run, Step
from lowtide.garbage import rarely_collected
from lowtide.planning.activations import activations
from lowtide.planning.lower_bounds import Bounds
from lowtide.planning.schedules import without_needless_runs
from lowtide.planning.search.dropped_storages import retain_only
from lowtide.planning.search.step_problem import StepProblem
from lowtide.planning.search.table import RematSet, Table, schedule_of
from lowtide.planning.simulate import Timeline, baseline_runs, simulate
from lowtide.planning.transfer_model import can_offload
from lowtide.planning.transfer_schedule import placed

if TYPE_CHECKING:
    from lowtide.planning.registry import Answer
    from lowtide.planning.variants import Variant

Result = TypeVar("Result")


class PlanningProblem:
    """One step to plan for any budget. Every attribute is computed once, when first asked for.

    `variants` are the forms of the step that `auto` searches; without any, the step as it is.
    """

    def __init__(self, step: Step, variants: Sequence["Variant"] = ()) -> None:
        self.step, self.variants = step, tuple(variants)
        self._results: dict[object, object] = {}

    @cached_property
    @rarely_collected()
    def table(self) -> Table:
        """The step as plain tuples, for inner loops; it numbers all remats."""
        return Table(self.step)

    @cached_property
    def baseline(self) -> Timeline:
        """The step without any remat."""
        return simulate(self.step, baseline_runs(self.step))

    @cached_property
    def activations(self) -> tuple[Activation, ...]:
        """The forward storages that backward reads again, in the order they are made."""
        return activations(self.step, self.table.uses)

    @cached_property
    def bounds(self) -> Bounds:
        """Proven lower bounds for every budget."""
        return Bounds(self.table)

    @cached_property
    def search_problem(self) -> StepProblem:
        """The step for the compiled search."""
        return StepProblem(self.table, self.baseline)

    def retaining(self, storages: Iterable[int]) -> RematSet:
        """Retain these storages and recompute all others, each right before its first backward reader.

        Values that have no remat are retained as well.
        """
        return retain_only(self.table, storages)

    def timeline(self, remats: RematSet, *, budget_bytes: int = 0) -> Timeline:
        """Simulate the schedule of a set of remats: its peak, and the seconds it adds.

        Transfers of offloaded values hide behind compute as far as `budget_bytes` allow.
        """
        return self.placed(schedule_of(self.table, remats), budget_bytes)

    def placed(self, runs: Sequence[Run], budget_bytes: int) -> Timeline:
        """Simulate a schedule without its needless runs, and with its transfers where they hide best."""
        needed = without_needless_runs(self.step, runs)
        if can_offload(self.step):
            return placed(self.step, needed, budget_bytes=budget_bytes)
        return simulate(self.step, needed)

    def repaired(self, runs: Sequence[Run], *, budget_bytes: int) -> Timeline | None:
        """A schedule close to `runs` that fits; None where a short search finds none.

        KeyError where the step has no such remats.
        """
        order = self.search_problem.repaired(runs, budget_bytes=budget_bytes)
        return None if order is None else self.placed(self.search_problem.runs(order), budget_bytes)

    def once(self, work: Callable[["PlanningProblem"], Result]) -> Result:
        """`work(self)`, computed at the first call: for planners whose search serves all budgets."""
        if work not in self._results:
            self._results[work] = work(self)
        return cast(Result, self._results[work])

    def checked(self, answer: "Answer", *, budget_bytes: int, trusted: bool = True) -> Timeline:
        """Simulate a planner's answer. TypeError or ValueError where that is no schedule of the step."""
        if isinstance(answer, Timeline):
            return answer if trusted else simulate(self.step, answer.runs)
        if isinstance(answer, (set, frozenset)):
            return self.timeline(self._checked_remats(answer), budget_bytes=budget_bytes)
        if isinstance(answer, Sequence) and all(isinstance(run, Run) for run in answer):
            return simulate(self.step, answer)
        raise TypeError(f"{type(answer).__name__} is neither a set of remats nor a sequence of runs")

    def _checked_remats(self, remats: Iterable[object]) -> RematSet:
        known = len(self.table.remats)
        for remat in remats:
            match remat:
                case (int(slot), int(number)) if 0 <= slot < self.table.size and 0 <= number < known:
                    continue
            raise ValueError(
                f"{remat!r} is no (slot, number) of the {self.table.size} slots and {known} remats"
            )
        return frozenset(cast("RematSet", remats))
