"""Put a plan to work on a model, and plan the batch shapes that come later."""

import logging
from dataclasses import replace

from torch import nn

from lowtide.capture.analyse import analyse
from lowtide.capture.identity import identify_model
from lowtide.capture.segments import Run, Segment, Trace
from lowtide.capture.step import captured_step
from lowtide.capture.tangents import tangent_outputs
from lowtide.costing import Known, estimate_costs, measure_costs
from lowtide.errors import LowtideError, Unsupported
from lowtide.facts import Graph, Kind, Node, Region, Reserve, Step, Storage
from lowtide.planners import Desk
from lowtide.plans import Plan, check_identity
from lowtide.runtime import GraphPlan, install
from lowtide.sizes import format_size

logger = logging.getLogger("lowtide")


def apply_plan(plan: Plan, model: nn.Module) -> nn.Module:
    """Route `model`'s calls through `plan`, in place."""
    check_identity(plan, identify_model(model))
    install(model, PlanByGraph(plan, model))
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
        count = len(self.graphs)
        if count != 1:
            raise Unsupported(
                f"this model breaks into {count} graphs, and one of them came with a shape that the "
                "plan was not made for: keep the batch size, drop the last smaller batch, or plan again"
            )
        solution = self.plan.solution
        step = step_of(
            segment, self.model, like=self.graphs[0], reserve=solution.reserve, known=self.plan.known
        )
        answer = Desk(step).solve(budget_bytes=solution.budget_bytes, planner=solution.planner)
        logger.info(
            "a new batch shape got a plan of its own: %s of %s",
            format_size(answer.peak_bytes),
            solution.budget_bytes,
        )
        return graph_plan(answer.graphs[0])


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
        runs=[Run(segment)],
        returned=frozenset((0, output) for output in returned),
        given=frozenset((0, output) for output in tangents - missing),
        num_model_runs=1,
    )
    captured = captured_step(analyse(traced), traced, model)
    step = measure_costs(captured)[0] if known is None else estimate_costs(captured, known)
    return _with_reserve(step, reserve)


def _with_reserve(step: Step, reserve: Reserve) -> Step:
    """Add what the graph does not show: the optimizer's state and temporaries, and the loss."""
    first = len(step.storages)
    sizes = (reserve.optimizer_state_bytes, reserve.loss_bytes, reserve.optimizer_peak_bytes)
    kinds = (Kind.OPTIMIZER_STATE, Kind.OTHER, Kind.OTHER)
    names = ("optimizer state", "loss", "optimizer")
    storages = tuple(
        Storage(id=first + i, nbytes=nbytes, kind=kind, name=name, static=i < 2)
        for i, (nbytes, kind, name) in enumerate(zip(sizes, kinds, names, strict=True))
    )
    node = Node(
        rank=len(step.nodes),
        name="optimizer",
        op="optimizer",
        region=Region.OPTIMIZER,
        kind=Kind.OTHER,
        holds=(first + 2,),
        makes=(first + 2,),
    )
    return replace(step, storages=(*step.storages, *storages), nodes=(*step.nodes, node))


def graph_plan(graph: Graph) -> GraphPlan:
    """What a planned graph runs, as the runtime takes it."""
    return GraphPlan(schedule=graph.schedule, missing=frozenset(graph.missing))
