"""Put a plan to work on a model, and plan the batch shapes that come later."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil

from torch import nn

from lowtide.capture.analyse import analyse
from lowtide.capture.graphs import Execution, Segment, Trace
from lowtide.capture.identity import identify_inputs, identify_model
from lowtide.capture.step import captured_step
from lowtide.capture.tangents import tangent_outputs
from lowtide.errors import BudgetTooSmall, LowtideError, Unsupported
from lowtide.facts import Graph, Kind, Node, Region, Reserve, Step, Storage
from lowtide.facts.units import format_size, size_and_bytes
from lowtide.planning.planner import Desk
from lowtide.planning.schedules import batch_bytes, graph_schedules, runs_of_schedule
from lowtide.planning.simulate import simulate
from lowtide.plans import Plan, check_identity
from lowtide.profiling.costing import Known, estimate_costs, measure_costs
from lowtide.running.backend import GraphPlan
from lowtide.running.executor import EAGER_OPS, Executor
from lowtide.running.runner import install

logger = logging.getLogger("lowtide")


def apply_plan(plan: Plan, model: nn.Module, *, executor: Executor = EAGER_OPS) -> nn.Module:
    """Route `model`'s calls through `plan`, in place; `executor` runs the graphs."""
    check_identity(plan, identify_model(model))
    spare_bytes = plan.budget_bytes - plan.peak_bytes
    install(model, PlanByGraph(plan, model), spare_bytes=spare_bytes, executor=executor)
    return model


class PlanByGraph:
    """The plan of every graph that comes: the one that was made, or a new one for another shape."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self.plan = plan
        self.model = model
        self.graphs = [graph for graph in plan.solution.graphs if graph.in_model]
        self.known = {graph.fingerprint: graph_plan(graph) for graph in self.graphs}

    def __call__(self, segment: Segment) -> GraphPlan:
        if segment.fingerprint not in self.known:
            self.known[segment.fingerprint] = self._plan_anew(segment)
        return self.known[segment.fingerprint]

    def _plan_anew(self, segment: Segment) -> GraphPlan:
        count, cause = len(self.graphs), why_unknown(segment, self.graphs)
        if count != 1:
            raise Unsupported(
                f"this model breaks into {count} graphs, and one of them is not one that the plan was made "
                f"for: {cause}. Keep that as it was, or plan again"
            )
        # other parameters to train or another dtype: the optimizer's bytes are others, too
        check_identity(self.plan, identify_model(self.model))
        if any(origin.kind is Kind.OTHER for origin in segment.origins):
            raise Unsupported(
                "the model breaks into several graphs now, and was one graph when it was planned, so no "
                "budget can be promised: does its forward print or read values only now and then? "
                "Plan it as it trains, or keep its forward the same"
            )
        solution = self.plan.solution
        step = step_of(
            segment, self.model, like=self.graphs[0], reserve=solution.reserve, known=self.plan.known
        )
        desk, budget_bytes = Desk(step), solution.budget_bytes
        try:
            answer = desk.solve(budget_bytes=budget_bytes, planner=solution.planner)
            peak_bytes, graph = answer.peak_bytes, answer.graphs[0]
        except BudgetTooSmall:
            if growth(step, like=self.graphs[0], reserve=solution.reserve) > 1:
                raise
            peak_bytes, graph = _lowest(desk, self.graphs[0])
        if peak_bytes > budget_bytes:
            logger.warning(
                "a graph without a plan (%s) runs by its lowest one, with a peak of at most %s: "
                "that it stays within the budget of %s is not proven",
                cause,
                size_and_bytes(peak_bytes),
                size_and_bytes(budget_bytes),
            )
        else:
            logger.info(
                "a graph without a plan (%s) got one of its own: %s of %s",
                cause,
                format_size(peak_bytes),
                format_size(budget_bytes),
            )
        return graph_plan(graph)


def why_unknown(segment: Segment, planned: Sequence[Graph]) -> str:
    """Why a graph is none of the planned ones, as far as its inputs tell."""
    now = identify_inputs(segment)
    alike = [graph.inputs for graph in planned if len(graph.inputs) == len(now)]
    if now in alike:
        return (
            "its inputs are as planned, so the model took another path through its code, or runs in another "
            "setting, such as autocast"
        )
    if not alike:
        return f"it reads {len(now)} inputs of the batch"
    new, old = next(pair for pair in zip(now, alike[0], strict=True) if pair[0] != pair[1])
    return f"its input {new} was planned as {old}"


def _lowest(desk: Desk, planned: Graph) -> tuple[int, Graph]:
    """The lowest peak known for a step, and its graph: by a new plan, or by the planned schedule.

    A search can miss for a smaller batch what it found for the planned one.
    """
    lowest = desk.solve(budget_bytes=desk.floor().floor_bytes)
    try:
        runs = runs_of_schedule(desk.step, planned.schedule)
        peak_bytes = simulate(desk.step, runs).peak_bytes
    except ValueError:  # the ops of this shape are others
        return lowest.peak_bytes, lowest.graphs[0]
    if lowest.peak_bytes <= peak_bytes:
        return lowest.peak_bytes, lowest.graphs[0]
    return peak_bytes, graph_schedules(desk.step, runs)[0]


def step_of(
    segment: Segment, model: nn.Module, *, like: Graph | None, reserve: Reserve, known: Known | None
) -> Step:
    """The facts of a step around one graph, its times from ops measured before.

    Which outputs are returned and get a gradient is as in `like`; without it, all of them.
    """
    tangents = frozenset(tangent_outputs(segment.joint).values())
    every = range(segment.num_forward_outputs)
    if like is not None and (max((*like.returned, *like.missing), default=0) >= segment.num_forward_outputs):
        raise LowtideError("the model returned fewer outputs than the plan was made for: plan again")
    returned = like.returned if like is not None else tuple(every)
    missing = frozenset(like.missing) if like is not None else frozenset()
    traced = Trace(
        executions=[Execution(segment)],
        returned=frozenset((0, output) for output in returned),
        given=frozenset((0, output) for output in tangents - missing),
        num_in_model=1,
    )
    captured = captured_step(analyse(traced), traced, model)
    step = measure_costs(captured)[0] if known is None else estimate_costs(captured, known)
    return _with_reserve(step, reserve, growth=growth(step, like=like, reserve=reserve))


def growth(step: Step, *, like: Graph | None, reserve: Reserve) -> Fraction:
    """How many times larger a step's batch is than the planned one; 1 for a smaller one.

    Taken from what the model reads or from what it gives the loss to read, whichever grew more:
    an input that is the same for every batch hides how the others grow.
    """
    pairs = [(batch_bytes(step), reserve.batch_bytes)]
    if like is not None:
        pairs.append((step.graphs[0].tangent_bytes, like.tangent_bytes))
    return max([Fraction(1), *(Fraction(new, planned) for new, planned in pairs if planned)])


def _with_reserve(step: Step, reserve: Reserve, *, growth: Fraction) -> Step:
    """Add what the graph does not show, where it is held: the optimizer's state and temporaries, the loss.

    A smaller batch's loss needs at most what the planned one's does; a larger one's grows with it.
    """
    loss_bytes, kept_bytes, input_bytes = (
        ceil(nbytes * growth)
        for nbytes in (reserve.loss_bytes, reserve.loss_kept_bytes, reserve.loss_input_bytes)
    )
    state, inputs, kept, temporaries = range(len(step.storages), len(step.storages) + 4)
    storages = (
        Storage(
            id=state,
            nbytes=reserve.optimizer_state_bytes,
            kind=Kind.OPTIMIZER_STATE,
            name="optimizer state",
            static=True,
        ),
        Storage(id=inputs, nbytes=input_bytes, kind=Kind.INPUT, name="inputs of the loss", static=True),
        Storage(id=kept, nbytes=kept_bytes, kind=Kind.OTHER, name="loss", pinned=True),
        Storage(id=temporaries, nbytes=reserve.optimizer_peak_bytes, kind=Kind.OTHER, name="optimizer"),
    )
    optimizer = Node(
        rank=len(step.nodes),
        name="optimizer",
        op="optimizer",
        region=Region.OPTIMIZER,
        kind=Kind.OTHER,
        holds=(temporaries,),
        makes=(temporaries,),
    )
    nodes = [*step.nodes, optimizer]
    # The graph's own inputs of the backward pass come next and take less than what is inside here.
    end = nodes[step.first_backward_rank - 1]
    nodes[end.rank] = replace(
        end,
        holds=(*end.holds, kept),
        makes=(*end.makes, kept),
        workspace_bytes=max(0, loss_bytes - kept_bytes),
    )
    return replace(step, storages=(*step.storages, *storages), nodes=tuple(nodes))


def graph_plan(graph: Graph) -> GraphPlan:
    """What a planned graph runs, as the runtime takes it."""
    return GraphPlan(schedule=graph.schedule, missing=frozenset(graph.missing))
