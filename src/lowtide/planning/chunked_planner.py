"""Plans for a step whose ops can run in other ways: chains in slices, larger and smaller ones.

Every search here is of one choice for all chains of the backward pass: all ops one by one, each chain as it
is fastest, and each as it holds least. One more brings no forward value back in slices, since a search among
more ways may miss what one among fewer finds. A budget takes the cheapest of what they find, so that no plan
is slower than without chains, and a larger budget is never slower than a smaller one.

Shortcomings: between those choices, nothing is tried for single chains, and bounds say nothing of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import fsum

from lowtide.facts import Action, GraphRun, Node, Region, Remat, Run, Solution, Step
from lowtide.planning.planner import Planner, StepSchedules
from lowtide.planning.schedules import graph_schedules, runs_of_schedules
from lowtide.planning.simulate import Timeline, extra_seconds, is_again, remat_of, simulate, stood_in_for

WORTH = 0.9
"""Times differ by less than this by chance: another way must be faster by more to be taken for its time."""

Choice = tuple[Run, ...]
"""Runs of backward nodes by methods, in the order of their ranks."""


@dataclass(frozen=True, slots=True)
class Way:
    """One choice for all chains, what plans its step, and the seconds that the plain step takes longer so."""

    choice: Choice
    desk: Planner
    extra_seconds: float


def has_other_ways(step: Step) -> bool:
    """Whether some op can run in another way, or be computed again in more ways than one."""
    backward = any(node.remats and node.region is Region.BACKWARD for node in step.nodes)
    return backward or any(_again_in_one_way(node) != node.remats for node in step.nodes)


def _again_in_one_way(node: Node) -> tuple[Remat, ...]:
    """The remats of a forward node without those that compute it again in another way than the preferred."""
    if node.region is not Region.FORWARD:
        return node.remats
    preferred = node.recompute
    return tuple(r for r in node.remats if r.action is not Action.RECOMPUTE or r is preferred)


def without_dearer(step: Step) -> Step:
    """Without remats that hold more than another that makes the same of the same in hardly more time."""
    nodes = [
        replace(node, remats=tuple(r for r in node.remats if not _is_dearer(r, node.remats)))
        if node.region is Region.FORWARD and len(node.remats) > 1
        else node
        for node in step.nodes
    ]
    return step if nodes == list(step.nodes) else replace(step, nodes=tuple(nodes))


def _is_dearer(remat: Remat, others: Sequence[Remat]) -> bool:
    made = (remat.action, remat.reads, remat.holds, remat.makes)
    return any(
        (other.action, other.reads, other.holds, other.makes) == made
        and other.workspace_bytes < remat.workspace_bytes
        and remat.seconds > WORTH * other.seconds
        for other in others
    )


class ChunkedPlanner(Planner):
    """Plans for one step whose backward ops can run in other ways; `make` gives what plans a step of ops that
    have one way each."""

    def __init__(self, step: Step, make: Callable[[Step], Planner]) -> None:
        super().__init__(step)
        self._make = make

    @cached_property
    def ways(self) -> list[Way]:
        choices: dict[Choice, None] = dict.fromkeys(((), _fastest(self.step), _smallest(self.step)))
        found = [self._way(choice) for choice in choices]
        nodes = tuple(replace(node, remats=_again_in_one_way(node)) for node in self.step.nodes)
        if nodes != self.step.nodes:
            found.append(Way((), self._make(replace(self.step, nodes=nodes)), 0.0))
        return found

    def _way(self, choice: Choice) -> Way:
        desk = self._make(step_by(self.step, choice))
        return Way(choice, desk, fsum(extra_seconds(self.step, run) for run in choice))

    def best(self, budget_bytes: int) -> Timeline | None:
        """The cheapest way to run the step in that many bytes."""
        found = [(way, way.desk.best(budget_bytes)) for way in self.ways]
        fit = [(way, timeline) for way, timeline in found if timeline is not None]
        if not fit:
            return None
        way, timeline = min(fit, key=lambda pair: pair[1].added_seconds + pair[0].extra_seconds)
        return simulate(self.step, _in_slices(self.step, timeline.runs, way.choice))

    def solve(self, *, budget_bytes: int, planner: str = "auto", may_be_eager: bool = False) -> Solution:
        if planner == "auto":
            return super().solve(budget_bytes=budget_bytes, planner=planner, may_be_eager=may_be_eager)
        desk = self.ways[0].desk
        return desk.solve(budget_bytes=budget_bytes, planner=planner, may_be_eager=may_be_eager)

    def lowest(self) -> Timeline:
        timeline = self.best(self.floor_bytes)
        assert timeline is not None
        return timeline

    @property
    def floor_bytes(self) -> int:
        return min(way.desk.floor_bytes for way in self.ways)

    def adapt(self, schedules: Sequence[Sequence[GraphRun]], *, budget_bytes: int) -> StepSchedules | None:
        """As any desk does, with the chains that the schedules have."""
        try:
            runs = runs_of_schedules(self.step, schedules)
            choice = tuple(run for run in runs if not run.is_first and not is_again(self.step, run))
            way = next((way for way in self.ways if way.choice == choice), None) or self._way(choice)
            timeline = way.desk.repaired(_one_by_one(self.step, runs), budget_bytes=budget_bytes)
        except (KeyError, ValueError):  # the ops are others
            return None
        if timeline is None:
            return None
        sliced = _in_slices(self.step, timeline.runs, choice)
        return StepSchedules(timeline.peak_bytes, graph_schedules(self.step, sliced))

    def floor_bound(self) -> int | None:
        return min(way.desk.bounds.floor_bytes for way in self.ways)

    def _lower_bound(self, timeline: Timeline, budget_bytes: int) -> float | None:
        proven = min(way.desk.bounds.seconds(budget_bytes) + way.extra_seconds for way in self.ways)
        return max(0.0, min(proven, timeline.added_seconds))


def step_by(step: Step, choice: Choice) -> Step:
    """The same step with each chain of `choice` as one op: those that it stands in for do nothing."""
    nodes = list(step.nodes)
    for run in choice:
        remat = remat_of(step, run)
        for rank in stood_in_for(step, run):
            nodes[rank] = replace(
                nodes[rank], reads=(), holds=(), makes=(), seconds=0.0, workspace_bytes=0, remats=()
            )
        nodes[run.rank] = replace(
            nodes[run.rank],
            reads=remat.reads,
            seconds=remat.seconds,
            workspace_bytes=remat.workspace_bytes,
        )
    return replace(step, nodes=tuple(nodes))


def _fastest(step: Step) -> Choice:
    return _chosen(step, _fastest_of)


def _fastest_of(step: Step, node: Node) -> Remat | None:
    remat = min(node.remats, key=lambda r: (r.seconds, r.workspace_bytes))
    now = [node.rank, *stood_in_for(step, Run(node.rank, remat.rule))]
    return remat if remat.seconds < WORTH * fsum(step.nodes[rank].seconds for rank in now) else None


def _smallest(step: Step) -> Choice:
    return _chosen(step, _smallest_of)


def _smallest_of(step: Step, node: Node) -> Remat | None:
    smaller = [
        remat
        for remat in node.remats
        if set(remat.reads) != set(node.reads) or remat.workspace_bytes < node.workspace_bytes
    ]
    return min(smaller, key=lambda r: (r.workspace_bytes, r.seconds), default=None)


def _chosen(step: Step, pick: Callable[[Step, Node], Remat | None]) -> Choice:
    picked = [
        (node.rank, pick(step, node)) for node in step.nodes if node.remats and node.region is Region.BACKWARD
    ]
    return tuple(Run(rank, remat.rule) for rank, remat in picked if remat is not None)


def _in_slices(step: Step, runs: Sequence[Run], choice: Choice) -> tuple[Run, ...]:
    """A schedule of `step_by(step, choice)` as one of the step itself."""
    by_method: Mapping[int, Run] = {run.rank: run for run in choice}
    needless = {rank for run in choice for rank in stood_in_for(step, run)}
    return tuple(
        by_method.get(run.rank, run) if run.is_first else run
        for run in runs
        if not run.is_first or run.rank not in needless
    )


def _one_by_one(step: Step, runs: Sequence[Run]) -> tuple[Run, ...]:
    """A schedule of the step as one of its step by the choice that the schedule has."""
    left_out = sorted(rank for run in runs for rank in stood_in_for(step, run))
    found: list[Run] = []
    for run in runs:
        if is_again(step, run):
            found.append(run)
            continue
        while left_out and left_out[0] < run.rank:
            found.append(Run(left_out.pop(0)))
        found.append(Run(run.rank))
    return tuple(found)
