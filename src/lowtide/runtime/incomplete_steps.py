"""Steps of which only a part is known: a graph without a plan, or an unknown loss.

step_of            one graph, with the bytes of the rest as `Reserve`
step_of_call       a whole call, captured without running it
BesideGraphs       tensors that the loop makes for every step
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil
from typing import Any

import torch
from torch import nn

from lowtide.analyze.captured_step import Captured, captured_step, only_loss_live
from lowtide.analyze.gradient_sums import can_hand_over, sums_of
from lowtide.analyze.graph_facts import analyze_graphs
from lowtide.facts import (
    Graph,
    GraphRun,
    Kind,
    Node,
    Region,
    Reserve,
    Step,
    Storage,
    TransferSpeed,
)
from lowtide.ops.gradient_terms import is_part
from lowtide.planning.graph_fetches import transfers_of
from lowtide.planning.planner import Planner, StepSchedules
from lowtide.planning.repeated_calls import LOSS, LOSS_INPUTS
from lowtide.planning.resting_sets import fixed_form
from lowtide.planning.schedules import (
    batch_bytes,
    graph_schedules,
    reserve,
    runs_of_schedules,
    with_buckets,
)
from lowtide.planning.simulate import simulate
from lowtide.profiling.costing import KnownCosts, estimate_costs, measure_costs
from lowtide.torch_compat import dispatch
from lowtide.torch_compat.aot_autograd import Orders
from lowtide.trace.compile_settings import one_at_a_time
from lowtide.trace.identity import user_tensors
from lowtide.trace.model_call import Loop
from lowtide.trace.segments import Execution, Segment, Trace
from lowtide.trace.trace_model import trace


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideGraphs:
    """Bytes of tensors that the loop makes for every step and no capture sees, for the planned batch.

    `step_bytes` are live all along: labels that are no argument of the model. `forward_bytes` are live until
    the backward pass begins, as the last step's loss and its `gradient_bytes` are, which no batch changes.
    `path_bytes` are saved by graphs that run more often than planned, where values decide which graphs run.
    """

    step_bytes: int = 0
    path_bytes: int = 0
    forward_bytes: int = 0
    gradient_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.step_bytes + self.path_bytes + self.forward_bytes + self.gradient_bytes

    def added_to(self, step: Step, times: Fraction = Fraction(1)) -> Step:
        """A step with these bytes, for a batch that is `times` as large."""
        if not self.nbytes:
            return step
        step_bytes = ceil(self.step_bytes * times) + self.path_bytes
        before_bytes = ceil(self.forward_bytes * times) + self.gradient_bytes
        whole = Storage(
            id=len(step.storages), nbytes=step_bytes, kind=Kind.INPUT, name=LOSS_INPUTS, static=True
        )
        nodes = tuple(
            replace(node, workspace_bytes=node.workspace_bytes + before_bytes)
            if node.rank < step.first_backward_rank and node.workspace_bytes >= 0
            else node
            for node in step.nodes
        )
        return replace(step, storages=(*step.storages, whole), nodes=nodes)


NOTHING_BESIDE = BesideGraphs()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """The known facts of a model's steps besides their graphs.

    `update_bytes`: the bytes that each parameter's update in the backward pass allocates. `resting`: what
    rests on the store (`Solution.resting`). `beside`: what the loop was seen to keep live besides.
    `read_outputs`: by the structure of a graph as it is traced, the outputs that the loop's loss was seen to
    read besides a loss that the model returns. `calls`: how often a step calls the model before its first
    backward pass.
    """

    model: nn.Module
    reserve: Reserve
    known: KnownCosts | None = None
    loop: Loop = field(default_factory=Loop)
    update_bytes: Mapping[int, int] | None = None
    transfer_speed: TransferSpeed | None = None
    offload_what: tuple[str, ...] = ()
    resting: tuple[str, ...] = ()
    rounds: tuple[str, ...] = ()
    orders: Orders | None = None
    beside: BesideGraphs = NOTHING_BESIDE
    read_outputs: Mapping[str, frozenset[int]] = field(default_factory=dict)
    calls: int = 1

    def captured(self, traced: Trace, **options: Any) -> Captured:
        """A traced step with its facts; `options` are those of `captured_step`."""
        accumulate = bool(self.reserve.earlier_gradient_bytes)
        facts = analyze_graphs(
            traced,
            accumulate=accumulate,
            several_calls=self.calls > 1,
            last_output_bytes=self.reserve.last_output_bytes if self.loop.holds_outputs else None,
            updates=self.update_bytes,
            offload="activations" in self.offload_what,
            rounds=self.rounds,
            tensors=user_tensors(self.model, options.get("batch", ())),
        )
        return captured_step(facts, traced, self.model, offload_what=self.offload_what, **options)

    def costed(self, captured: Captured) -> Step:
        """A captured step with costs from ops that were measured before, or measured now."""
        known = self.known
        step = measure_costs(captured)[0] if known is None else estimate_costs(captured, known)
        return fixed_form(replace(step, transfer_speed=self.transfer_speed), self.resting)


def step_of(
    segment: Segment,
    context: StepContext,
    *,
    like: Graph | None,
    planned: Graph | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    live_bytes: int = 0,
    later_bytes: int = 0,
    is_whole: bool = True,
) -> Step:
    """The facts of a step around one graph, without what the loop keeps live besides (`context.beside`).

    The returned outputs and those with a gradient are as in `like`; without `like`, all of them. The reserve
    was found for the graph `planned`, and includes the optimizer's bytes, unless `optimizer` is given. Other
    graphs, which exist unless `is_whole`, take `live_bytes` during the whole step, and `later_bytes` between
    the forward and the backward pass.
    """
    tangents = frozenset(segment.tangents.values())
    returned = like.returned if like is not None else tuple(range(segment.num_forward_outputs))
    missing = frozenset(like.missing) if like is not None else frozenset()
    # without a like, a later graph may use any of the same weights
    is_unknown = like is None and not is_whole
    known = () if is_whole or like is None else like.apart
    sums = sums_of(segment)
    apart = {*known, *(place for place in sums if is_unknown or is_part(segment.primals[place]))}
    traced = Trace(
        executions=[
            Execution(segment, apart=frozenset(apart), handed_over=_handed_over(segment, apart, like=like))
        ],
        returned=frozenset((0, output) for output in returned),
        given=frozenset((0, output) for output in tangents - missing),
        num_in_model=1,
    )
    with dispatch.real_tensors():  # torch may be tracing
        captured = context.captured(traced, optimizer=optimizer)
    step = context.costed(captured)
    times = growth(step, like=planned, reserve=context.reserve)
    besides = _besides(context.reserve, times, optimizer)
    state_bytes, loss_bytes = besides.optimizer_state_bytes + live_bytes, besides.loss_bytes + later_bytes
    besides = replace(besides, optimizer_state_bytes=state_bytes, loss_bytes=loss_bytes)
    return _with_reserve(step, besides)


def _handed_over(segment: Segment, apart: Collection[int], *, like: Graph | None) -> frozenset[int]:
    """The inputs whose gradients leave a graph as soon as they are made, as in `like`."""
    if not can_hand_over(segment):
        return frozenset()
    places = (*apart, *(like.handed_over if like is not None else ()))
    return frozenset(
        place for place in places if place < len(segment.gradients) and not is_part(segment.primals[place])
    )


@one_at_a_time
def step_of_call(args: tuple[Any, ...], kwargs: dict[str, Any], context: StepContext) -> Step:
    """The facts of the step that a call of the model begins, captured whole, without running it, and without
    what the loop keeps live besides (`context.beside`).

    Facts of the loop are taken from the loop where known and valid for this call, else from the reserve.
    """
    loop = context.loop
    traced = trace(
        context.model,
        args,
        kwargs,
        loss=loop.loss,
        any_loss=True,
        orders=context.orders,
        read_outputs=context.read_outputs,
    )
    if not loop.holds_outputs:
        traced = only_loss_live(traced)
    optimizer = optimizer_of(context.model, loop)
    step = context.costed(context.captured(traced, batch=(args, kwargs), optimizer=optimizer))
    times = growth(step, like=None, reserve=context.reserve)
    besides = _besides(context.reserve, times, optimizer)
    if any(not graph.in_model for graph in step.graphs):
        given = reserve(step)
        kept_bytes = max(0, besides.loss_kept_bytes - given.loss_kept_bytes)
        step = _with_larger_loss(step, max(0, besides.loss_bytes - given.loss_bytes))
        besides = replace(
            besides, loss_bytes=0, loss_kept_bytes=kept_bytes, loss_input_bytes=loop.reserve_bytes
        )
    return _with_reserve(step, besides)


def _with_larger_loss(step: Step, more_bytes: int) -> Step:
    """A step with a loss of its own, around which the loop makes `more_bytes`."""
    nodes = tuple(
        replace(node, workspace_bytes=node.workspace_bytes + more_bytes)
        if node.segment >= 0 and not step.graphs[node.segment].in_model
        else node
        for node in step.nodes
    )
    return replace(step, nodes=nodes)


def as_in(like: Graph, segment: Segment) -> Graph | None:
    """`like` with its outputs numbered as in `segment`, which may change other buffers; None where `segment`
    returns more or less."""
    changed = len(segment.mutated_inputs)
    if like.num_outputs - like.num_mutated != segment.num_forward_outputs - changed:
        return None
    shift = changed - like.num_mutated
    returned = tuple(output + shift for output in like.returned if output >= like.num_mutated)
    missing = tuple(output + shift for output in like.missing if output >= like.num_mutated)
    return replace(
        like, returned=returned, missing=missing, num_outputs=segment.num_forward_outputs, num_mutated=changed
    )


def optimizer_of(model: nn.Module, loop: Loop) -> torch.optim.Optimizer | None:
    """The loop's optimizer, unless it is gone or trains other parameters by now."""
    optimizer = loop.optimizer
    if optimizer is None:
        return None
    own = {id(parameter) for parameter in model.parameters()}
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return optimizer if all(id(parameter) in own for parameter in trained) else None


def growth(step: Step, *, like: Graph | None, reserve: Reserve) -> Fraction:
    """The factor from the planned batch to a step's batch; 1 for a smaller one.

    The larger growth counts, of the model's inputs or of the outputs that the loss reads: an input that is
    the same for every batch hides the growth of the others.
    """
    pairs = [(batch_bytes(step), reserve.batch_bytes)]
    if like is not None:
        pairs.append((step.graphs[0].tangent_bytes, like.tangent_bytes))
    return max([Fraction(1), *(Fraction(new, planned) for new, planned in pairs if planned)])


def _besides(reserve: Reserve, times: Fraction, optimizer: torch.optim.Optimizer | None) -> Reserve:
    """The reserve of a step whose batch is `times` larger; a traced `optimizer` is a graph and needs no
    reserve.

    The bytes of the loss grow with the batch.
    """
    return replace(
        reserve,
        loss_bytes=ceil(reserve.loss_bytes * times),
        loss_kept_bytes=ceil(reserve.loss_kept_bytes * times),
        loss_input_bytes=ceil(reserve.loss_input_bytes * times),
        optimizer_state_bytes=reserve.optimizer_state_bytes if optimizer is None else 0,
        optimizer_peak_bytes=reserve.optimizer_peak_bytes if optimizer is None else 0,
    )


def _with_reserve(step: Step, reserve: Reserve) -> Step:
    """Add the reserve to a step, where its bytes are live: the optimizer's state and temporaries, the loss,
    the buckets of gradients."""
    state, inputs, kept, temporaries = range(len(step.storages), len(step.storages) + 4)
    storages = (
        Storage(
            id=state,
            nbytes=reserve.optimizer_state_bytes,
            kind=Kind.OPTIMIZER_STATE,
            name="optimizer state",
            static=True,
        ),
        Storage(
            id=inputs,
            nbytes=reserve.loss_input_bytes,
            kind=Kind.INPUT,
            name=LOSS_INPUTS,
            static=True,
        ),
        Storage(id=kept, nbytes=reserve.loss_kept_bytes, kind=Kind.OTHER, name=LOSS, pinned=True),
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
    # the tangents of the graph come next; they take fewer bytes than this workspace
    end = nodes[step.first_backward_rank - 1]
    nodes[end.rank] = replace(
        end,
        holds=(*end.holds, kept),
        makes=(*end.makes, kept),
        workspace_bytes=max(0, reserve.loss_bytes - reserve.loss_kept_bytes),
    )
    whole = replace(step, storages=(*step.storages, *storages), nodes=tuple(nodes))
    return with_buckets(
        whole, bucket_bytes=reserve.bucket_bytes, gradients_in_buckets=reserve.gradients_in_buckets
    )


def schedules_of(step: Step, own: Sequence[Graph]) -> list[tuple[GraphRun, ...]]:
    """The schedules of the graphs `own` for a step; the graphs of the loss have empty ones."""
    return [graph.schedule for graph in own] + [()] * (len(step.graphs) - len(own))


def lowest_schedules(planner: Planner, like: Sequence[Graph]) -> StepSchedules:
    """The lowest peak known for a step, and its schedules: found by a search, or those of the graphs `like`.

    The search for a smaller batch can miss a schedule that it found for the planned batch.
    """
    step, lowest = planner.step, planner.solve(budget_bytes=planner.floor().floor_bytes)
    if like:
        try:
            runs = runs_of_schedules(step, schedules_of(step, like), *transfers_of(like))
            peak_bytes = simulate(step, runs).peak_bytes
        except ValueError:  # this shape has other ops
            pass
        else:
            if peak_bytes < lowest.peak_bytes:
                return StepSchedules(peak_bytes, graph_schedules(step, runs))
    return StepSchedules(lowest.peak_bytes, lowest.graphs)
