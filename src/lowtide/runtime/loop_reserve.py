"""What a plan's own graphs leave to the user's loop: room for a loss and for the tensors of a step.

Before the first step, the bytes of an unknown loss are reserved; the step shows how many they are.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from lowtide.errors import BudgetTooSmall
from lowtide.facts import LAST_OUTPUTS, Graph, GraphRun, Step
from lowtide.planning.graph_fetches import transfers_of
from lowtide.planning.repeated_graphs import planner_for
from lowtide.planning.resting_sets import resting_form
from lowtide.planning.schedules import runs_of_schedules
from lowtide.planning.simulate import simulate
from lowtide.plans import Plan
from lowtide.runtime.call_schedules import by_fingerprint
from lowtide.runtime.incomplete_steps import NOTHING_BESIDE, BesideGraphs

TIMES_OUTPUTS = 3
"""A cross-entropy of all that the model returns has the logarithms of the probabilities, their gradient, and
the gradient of the outputs live at once. Other common losses need less."""
SMALL_SHARE = 50
"""Targets, weights and losses of single rows take at most such a part of the outputs."""


@dataclass(frozen=True, slots=True)
class LossReserve:
    """A plan's `graphs` with schedules that leave `loss_bytes` to the loop's loss, and still fit."""

    loss_bytes: int
    graphs: tuple[Graph, ...]


def loss_reserve_for(plan: Plan, beside: BesideGraphs = NOTHING_BESIDE) -> LossReserve | None:
    """None where the plan leaves these bytes free or cannot free them, where it offloads values, or where the
    user chose the schedules."""
    own = _own_graphs(plan)
    loss_bytes = TIMES_OUTPUTS * own[-1].tangent_bytes + own[-1].tangent_bytes // SMALL_SHARE
    graphs = graphs_beside(plan, loss_bytes=loss_bytes, beside=beside)
    return None if graphs in (None, own) else LossReserve(loss_bytes, graphs)


def graphs_beside(
    plan: Plan, *, loss_bytes: int, loss_kept_bytes: int = 0, beside: BesideGraphs
) -> tuple[Graph, ...] | None:
    """The plan's graphs, with schedules that fit beside a loss of `loss_bytes` and other tensors of the loop;
    the plan's own where these fit. None where none is found."""
    step, solution = plan.step, plan.solution
    is_free = solution.planner == "auto" and not solution.eager and not solution.step_in_backward
    if step is None or step.transfer_speed is not None or not is_free:
        return None
    own = _own_graphs(plan)
    if leaves(plan, loss_bytes, beside, loss_kept_bytes=loss_kept_bytes):
        return own
    planner = planner_for(_with(step, loss_bytes, _more_kept_bytes(plan, loss_kept_bytes), beside))
    found = planner.adapt(_schedules(step, own), budget_bytes=plan.budget_bytes)
    if found is not None and found.peak_bytes <= plan.budget_bytes:
        return found.graphs[: len(own)]
    try:
        solved = planner.solve(budget_bytes=plan.budget_bytes)
    except BudgetTooSmall:
        return None
    return solved.graphs[: len(own)]


def leaves(plan: Plan, loss_bytes: int, beside: BesideGraphs, *, loss_kept_bytes: int = 0) -> bool:
    """Whether the plan fits with a loss of `loss_bytes` and other tensors of the loop."""
    own = by_fingerprint(_own_graphs(plan))
    peak_bytes = peak_beside(plan, own, loss_bytes=loss_bytes, loss_kept_bytes=loss_kept_bytes, beside=beside)
    return peak_bytes <= plan.budget_bytes


def peak_beside(
    plan: Plan,
    graphs: Mapping[str, Sequence[Graph]],
    *,
    loss_bytes: int = 0,
    loss_kept_bytes: int = 0,
    last_output_bytes: int | None = None,
    beside: BesideGraphs = NOTHING_BESIDE,
) -> float:
    """The peak of a plan by the schedules of `graphs`, where the loop keeps more live; infinite where that is
    unknown. Of `loss_bytes`, `loss_kept_bytes` stay live through the backward pass: the number of a mean
    squared error lives in a block as large as its input."""
    step = plan.step
    own = _own_graphs(plan)
    if step is None or any(graph.fingerprint not in graphs for graph in own):
        return inf
    known = list(_run_by(own, graphs))
    step = resting_form(step, plan.solution.resting)
    if last_output_bytes is not None:
        if not any(storage.name == LAST_OUTPUTS for storage in step.storages):
            return inf
        step = replace(
            step,
            storages=tuple(
                replace(s, nbytes=last_output_bytes // step.calls) if s.name == LAST_OUTPUTS else s
                for s in step.storages
            ),
        )
    step = _with(step, loss_bytes, _more_kept_bytes(plan, loss_kept_bytes), beside)
    runs = runs_of_schedules(step, _schedules(step, known), *transfers_of(known))
    return simulate(step, runs).peak_bytes


def _run_by(own: Sequence[Graph], graphs: Mapping[str, Sequence[Graph]]) -> Iterator[Graph]:
    """The record of `graphs` by which each run of the graphs `own` is scheduled."""
    runs: Counter[str] = Counter()
    for graph in own:
        of_runs = graphs[graph.fingerprint]
        yield of_runs[min(runs[graph.fingerprint], len(of_runs) - 1)]
        runs[graph.fingerprint] += 1


def _schedules(step: Step, own: Sequence[Graph]) -> list[tuple[GraphRun, ...]]:
    """The schedules of all calls of a step, from those of the graphs `own` of one call."""
    per_call = len(step.graphs) // step.calls
    return [*(graph.schedule for graph in own), *[()] * (per_call - len(own))] * step.calls


def _own_graphs(plan: Plan) -> tuple[Graph, ...]:
    return tuple(graph for graph in plan.solution.graphs if graph.in_model)


def _more_kept_bytes(plan: Plan, loss_kept_bytes: int) -> int:
    """Those that the plan does not count."""
    return max(0, loss_kept_bytes - plan.solution.reserve.loss_kept_bytes)


def _with(step: Step, loss_bytes: int, more_kept_bytes: int, beside: BesideGraphs) -> Step:
    end = step.first_backward_rank - 1
    nodes = [
        replace(node, workspace_bytes=max(node.workspace_bytes, loss_bytes))
        if node.rank == end
        else replace(node, workspace_bytes=node.workspace_bytes + more_kept_bytes)
        if node.rank > end and node.workspace_bytes >= 0
        else node
        for node in step.nodes
    ]
    return beside.added_to(replace(step, nodes=tuple(nodes)))
