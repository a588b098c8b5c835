"""From a model and a batch to the facts of one training step, without running it.

    model, batch ── trace ──> graphs ── analyze_graphs ──> nodes and storages of forward and backward
                                                                |
    Captured <── Step <── optimizer's ops <── shards <── tensors that no graph reads

`capture` does all of this. `with_costs` adds the costs once `Captured.calls` are profiled.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from lowtide.analyze.analysis import Analysis, GraphNode
from lowtide.analyze.analyze_again import AnalyzeAgain, StepSettings
from lowtide.analyze.capture_warnings import COUNTED, HOOKS, NOT_COUNTED, UNCAPTURED, warn_of
from lowtide.analyze.formulas import Formula, find_formulas
from lowtide.analyze.graph_facts import analyze_graphs
from lowtide.analyze.optimizer_facts import (
    StateFacts,
    add_optimizer,
    chunks_of_step,
    mark_resting,
    resting_state,
)
from lowtide.analyze.resting_facts import find_resting
from lowtide.errors import CaptureError
from lowtide.facts import RESERVED, Action, Graph, Kind, Run, Step
from lowtide.facts.gpus import Gpu
from lowtide.facts.pipeline import StageInPipeline
from lowtide.garbage import rarely_collected
from lowtide.ops.calls import Call, call_of, target_name, value_of
from lowtide.ops.random_ops import apply_mask, eager_dropout
from lowtide.optim.optimizer_trace import trace_optimizer
from lowtide.optim.split_check import update_bytes
from lowtide.parallel.sharded_step import shard
from lowtide.parallel.simulated_sharding import SimulatedSharding, simulated_optimizer
from lowtide.planning.log_lines import kind_of, step_line
from lowtide.planning.pipeline_bytes import in_pipeline
from lowtide.remat import Kept, rule_named, rules_of
from lowtide.stage_log import stage
from lowtide.torch_compat import aot_autograd
from lowtide.torch_compat.dispatch import is_number, local, map_leaves, storage_key
from lowtide.torch_compat.dtensor import is_divided
from lowtide.torch_compat.modules import has_backward_hooks, stepping_as_real
from lowtide.trace.compile_settings import one_at_a_time
from lowtide.trace.failures import refuse_several_graphs, refuse_what_cannot_be_traced
from lowtide.trace.identity import identify, identify_inputs, name_tensors, user_tensors
from lowtide.trace.model_call import split_batch, tensors_in
from lowtide.trace.segments import Segment, Trace, TracedModel
from lowtide.trace.trace_model import trace

SCALARS_BYTES = 1024
logger = logging.getLogger("lowtide")

Values = Mapping[fx.Node, Any]


@dataclass(slots=True)
class Captured:
    """A step whose times are still zero, the op behind every rank, and the graphs themselves.

    `calls` has the op of every first run, and of rematerializations that run a different op. `traced` is the
    model as torch compiled it, for its first planned step. `uncaptured_calls`: see `Analysis`. `again`
    analyzes the same graphs for a loop with other settings; None for a model that is sharded over processes.
    `not_rounding`: see `Analysis`.
    """

    step: Step
    calls: dict[Run, Call]
    graph_nodes: dict[int, GraphNode]
    segments: list[Segment]
    traced: TracedModel | None = None
    uncaptured_calls: dict[int, list[tuple[Call, int]]] = field(default_factory=dict)
    formulas: tuple[Formula, ...] = ()
    again: "AnalyzeAgain[Captured] | None" = None
    not_rounding: tuple[str, ...] = ()


@stage("capture", given=lambda model, *_, **__: kind_of(model), made=lambda found: step_line(found.step))
@one_at_a_time
def capture(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    accumulate: bool = False,
    calls: int = 1,
    stage: StageInPipeline | None = None,
    reserve_bytes: int = 0,
    step_in_backward: bool = False,
    holds_outputs: bool = True,
    simulated: SimulatedSharding | None = None,
    offload_what: tuple[str, ...] = (),
    gpu: Gpu | None = None,
) -> Captured:
    """Capture a step without running it. Needs the memory of the model, not of the step.

    - `accumulate`: the step begins with gradients of earlier micro-batches
    - `calls`: the loop calls the model so often before its first backward pass; the step is that of one call
    - `stage`: the place of the model in a pipeline
    - `reserve_bytes`: bytes that are live throughout, besides the step's own
    - `step_in_backward`: the optimizer updates each parameter as soon as its gradient is final
    - `holds_outputs`: the loop keeps all outputs live until the next forward pass ends, not the loss alone
    - `simulated`: as one of many processes would run the step
    - `offload_what`: what may be offloaded to the step's store (`OFFLOADABLE`); empty without a store
    - `gpu`: with the kernels that torch has on that GPU; such a step can be planned here, but not run
    """
    if not model.training:
        raise CaptureError("the model is in eval mode: call model.train() before capturing a training step")
    args, kwargs = split_batch(batch)
    refuse_what_cannot_be_traced(model, (args, kwargs), loss)
    settings = StepSettings(
        accumulate=accumulate,
        calls=calls,
        stage=stage,
        reserve_bytes=reserve_bytes,
        step_in_backward=step_in_backward,
        holds_outputs=holds_outputs,
        offload_what=offload_what,
    )
    with rarely_collected():
        traced = trace(model, args, kwargs, loss=loss, simulated=simulated, gpu=gpu)
        captured = analyzed(
            traced, model, (args, kwargs), settings, optimizer=optimizer, simulated=simulated, gpu=gpu
        )
    if has_backward_hooks(model):
        logger.warning(HOOKS)
    warn_of(captured.step, traced)
    if simulated is None and traced.sharding is None:
        again = partial(analyzed, traced, gpu=gpu)
        captured.again = AnalyzeAgain(again, model, (args, kwargs), settings, optimizer=optimizer)
    return captured


@one_at_a_time
def analyzed(
    traced: Trace,
    model: nn.Module,
    batch: Any,
    settings: StepSettings,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    simulated: SimulatedSharding | None = None,
    gpu: Gpu | None = None,
) -> Captured:
    """The step of traced graphs in a loop with these settings."""
    if not settings.holds_outputs:
        traced = only_loss_live(traced)
    updates: dict[int, int] = {}
    if settings.step_in_backward:
        updates = update_bytes(optimizer)
        refuse_several_graphs(traced)
    analysis = analyze_graphs(
        traced,
        accumulate=settings.accumulate,
        several_calls=settings.calls > 1,
        last_output_bytes=0 if settings.holds_outputs else None,
        updates=updates,
        offload=settings.offload,
        rounds=settings.rounds,
        tensors=user_tensors(model, batch),
    )
    if settings.reserve_bytes:
        analysis.add_storage(nbytes=settings.reserve_bytes, kind=Kind.INPUT, name=RESERVED, static=True)
    captured = captured_step(
        analysis,
        traced,
        model,
        batch=batch,
        optimizer=optimizer,
        simulated=simulated,
        offload_what=settings.offload_what,
        on_gpu=gpu is not None,
    )
    notes = (*captured.step.notes, HOOKS) if has_backward_hooks(model) else captured.step.notes
    step = replace(captured.step, holds_outputs=settings.holds_outputs, notes=notes, calls=settings.calls)
    return replace(
        captured,
        step=step if settings.stage is None else in_pipeline(step, settings.stage),
        # for a GPU, the compiled model calls kernels that a CPU lacks
        traced=None if gpu is not None else captured.traced,
    )


def only_loss_live(traced: Trace) -> Trace:
    """The trace of a loop that keeps only the loss live, not the model's other outputs."""
    return replace(traced, returned=traced.returned & traced.given)


def captured_step(
    analysis: Analysis,
    traced: Trace,
    model: nn.Module,
    *,
    batch: Any = (),
    optimizer: torch.optim.Optimizer | None = None,
    simulated: SimulatedSharding | None = None,
    offload_what: tuple[str, ...] = (),
    on_gpu: bool = False,
) -> Captured:
    """The step of analyzed graphs, with everything else that is live in a step: see `capture`.

    `on_gpu`: the optimizer's step as on a GPU.
    """
    _add_unread(analysis, model, batch)
    if traced.sharding is not None:
        trained = {id(each): name for name, each in model.named_parameters() if each.requires_grad}
        shard(analysis, traced, traced.sharding, trained=trained)
    find_resting(
        analysis,
        model,
        num_in_model=traced.num_in_model,
        what=offload_what,
        is_sharded=traced.sharding is not None,
    )
    _add_scalars(analysis, traced)
    calls = _calls(analysis, {})
    notes = _notes(analysis, traced)
    chunks: tuple[tuple[int, int], ...] = ()
    resting = StateFacts({})
    if optimizer is not None:
        _check_parameters(optimizer, model)
        if simulated is not None:
            optimizer = simulated_optimizer(
                optimizer, model, (analysis.inputs, analysis.gradients), simulated=simulated
            )
        whole = traced.sharding is not None or is_divided(model)  # the optimizer's state is divided already
        with stepping_as_real(on_gpu=on_gpu):
            traced_step = trace_optimizer(optimizer, analysis.gradients)
            if not whole:
                chunks = chunks_of_step(analysis, optimizer, traced_step)
            if not whole and "state" in offload_what:
                resting = resting_state(analysis, optimizer, traced_step)
        if resting.chunks and not chunks:  # chunks hold no fewer temporaries, but no state
            chunks = ((resting.chunks[0][0], traced_step.peak_bytes),)
        add_optimizer(analysis, traced_step, calls, chunks=chunks)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        mark_resting(analysis, resting, traced_step, names)
        if traced_step.note:
            notes = (*notes, traced_step.note)
            logger.warning(traced_step.note)
    step = Step(
        nodes=tuple(analysis.nodes),
        storages=tuple(analysis.storages),
        fingerprint="+".join(segment.fingerprint for segment in analysis.segments),
        device=str(analysis.device),
        notes=notes,
        graphs=_graphs(analysis, traced),
        identity=identify(model, batch),
        rules=tuple((rule.name, rule.words) for rule in rules_of(offload_what)),
        optimizer_chunks=chunks,
        gradient_strides=tuple(sorted(traced.orders.items())),
        stacks=tuple(analysis.stacks),
        first_break=traced.first_break,
        offload_what=offload_what,
        resting_chunks=resting.chunks,
    )
    return Captured(
        step=step,
        calls=calls,
        graph_nodes=analysis.graph_nodes,
        segments=analysis.segments,
        traced=traced.traced,
        uncaptured_calls=analysis.uncaptured_calls,
        formulas=find_formulas(analysis, num_in_model=traced.num_in_model),
        not_rounding=tuple(analysis.not_rounding),
    )


def _graphs(analysis: Analysis, traced: Trace) -> tuple[Graph, ...]:
    return tuple(
        Graph(
            fingerprint=segment.fingerprint,
            in_model=index < traced.num_in_model,
            returned=tuple(sorted(output for place, output in traced.returned if place == index)),
            missing=tuple(sorted(missing)),
            apart=tuple(sorted(apart)),
            handed_over=tuple(sorted(handed_over)),
            tangent_bytes=_tangent_bytes(analysis, segment, missing),
            inputs=identify_inputs(segment),
            structure=segment.structure,
            num_outputs=segment.num_forward_outputs,
            num_mutated=len(segment.mutated_inputs),
            rounds=rounds,
        )
        for index, (segment, missing, apart, handed_over, rounds) in enumerate(
            zip(
                analysis.segments,
                analysis.missing,
                analysis.apart,
                analysis.handed_over,
                analysis.rounding,
                strict=True,
            )
        )
    )


def _tangent_bytes(analysis: Analysis, segment: Segment, missing: frozenset[int]) -> int:
    tangents = segment.tangents
    values = [node.meta["val"] for node, output in tangents.items() if output not in missing]
    return sum(value.numel() * value.element_size() for value in values if analysis.counts(value))


def _check_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    known = {id(parameter) for parameter in model.parameters()}
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    strangers = sum(id(p) not in known for p in trained)
    if strangers:
        raise CaptureError(
            f"{strangers} of the optimizer's parameters do not belong to this model: "
            "make the optimizer from model.parameters() of the model that you pass"
        )


def _notes(analysis: Analysis, traced: Trace) -> tuple[str, ...]:
    notes = []
    nodes = (node for segment in analysis.segments for node in segment.joint.graph.nodes)
    if any(map(aot_autograd.has_own_checkpoint, nodes)):
        notes.append(
            "the model calls torch.utils.checkpoint (gradient_checkpointing): a share of the peak is one of "
            "the step with these calls, and a plan takes their place"
        )
    if traced.num_in_model > 1:
        where = f", first at {traced.first_break}" if traced.first_break else ""
        notes.append(
            f"the model breaks into {traced.num_in_model} graphs{where}; nothing is recomputed across them"
        )
    if traced.loss_is_uncaptured or any(execution.from_uncaptured for execution in traced.executions):
        notes.append(UNCAPTURED + (COUNTED if traced.uncaptured_is_counted else NOT_COUNTED))
    if traced.real_forward:
        notes.append("captured with one real forward pass, since the model's code reads tensor values")
    return tuple(notes)


def _add_scalars(analysis: Analysis, traced: Trace) -> None:
    """Add the few numbers that Python and autograd keep live around each graph."""
    for index in range(traced.num_in_model):
        name = f"scalars around graph {index}"
        analysis.add_storage(nbytes=SCALARS_BYTES, kind=Kind.OTHER, name=name, static=True)


def _add_unread(analysis: Analysis, model: nn.Module, batch: Any) -> None:
    """Add tensors that no graph reads: unused parameters, buffers, inputs."""
    tensors = {id(t): local(t) for t in (*model.parameters(), *model.buffers(), *tensors_in(batch))}
    known = {storage_key(tensors[key]) for key in analysis.inputs if key in tensors}
    for key, origin in name_tensors(model, batch).items():
        storage = storage_key(tensors[key])
        if storage not in known:
            known.add(storage)
            analysis.add_storage_of(tensors[key], kind=origin.kind, name=origin.name, static=True)


def with_values(captured: Captured, values: Values) -> Captured:
    """The same step, whose ops are called with other fake values of some nodes."""
    places = captured.graph_nodes
    own = {Run(rank): _own_call(place, values) for rank, place in places.items() if _calls_op(place)}
    others = {
        run: _remat_call(places[run.rank].node, run.rule, values)
        for run in captured.calls
        if not run.is_first
    }
    return replace(captured, calls=captured.calls | own | others)


def _calls(analysis: Analysis, values: Values) -> dict[Run, Call]:
    calls = {}
    for rank, place in analysis.graph_nodes.items():
        if not _calls_op(place):
            continue
        calls[Run(rank)] = _own_call(place, values)
        for remat in analysis.nodes[rank].remats:
            offloads = remat.action is Action.OFFLOAD
            if not offloads and not rule_named(remat.rule).costs_as_first:
                calls[Run(rank, remat.rule)] = _remat_call(place.node, remat.rule, values)
    for rank, kept in analysis.kept.items():
        if kept.timed:
            calls[Run(rank)] = _filled(kept.call, values)
    return calls


def _calls_op(place: GraphNode) -> bool:
    """Whether a node runs an op that takes time: an op on Python numbers takes almost none."""
    return place.node.op == "call_function" and not is_number(place.node.meta.get("val"))


def _own_call(place: GraphNode, values: Values) -> Call:
    return call_of(place.node, values) if place.call is None else _filled(place.call, values)


def _remat_call(node: fx.Node, rule: str, values: Values) -> Call:
    chosen = rule_named(rule)
    return _filled(chosen.call(node, chosen.kept(node)), values)


def _filled(call: Call, values: Values) -> Call:
    """A call with fake values for the nodes and kept tensors among its arguments, from `values` or else as
    captured."""

    def value(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            return values[leaf] if leaf in values else value_of(leaf)
        return leaf.value if isinstance(leaf, Kept) else leaf

    args, kwargs = map_leaves(value, (call.args, call.kwargs))
    return Call(call.target, tuple(args), dict(kwargs))


def own_workspace_bytes(op: str, workspace_bytes: int) -> int:
    """As much of an op's workspace as eager does not have: dropouts here copy their mask of bytes, chunk by
    chunk, into the dtype of the value, which eager's mask has from the start."""
    return workspace_bytes if op in map(target_name, (eager_dropout, apply_mask)) else 0


Cost = tuple[float, int, bool]
"""Seconds, workspace bytes, and whether they are estimated."""

FREE: Cost = (0.0, 0, False)


def with_costs(step: Step, costs: Mapping[Run, Cost]) -> Step:
    """The step with the costs of every run. A remat without a cost in `costs` costs as much as its node; a
    transfer costs only the time that the step waits for it."""
    nodes = []
    for node in step.nodes:
        own = costs.get(Run(node.rank), (0.0, 0, node.estimated))
        remats = []
        for remat in node.remats:
            like = FREE if remat.action is Action.OFFLOAD else own
            seconds, inside, _ = costs.get(Run(node.rank, remat.rule), like)
            remats.append(replace(remat, seconds=seconds, workspace_bytes=remat.workspace_bytes + inside))
        seconds, workspace, estimated = own
        nodes.append(
            replace(
                node,
                seconds=seconds,
                workspace_bytes=node.workspace_bytes + workspace,
                extra_eager_bytes=node.extra_eager_bytes - own_workspace_bytes(node.op, workspace),
                estimated=estimated or node.estimated,
                remats=tuple(remats),
            )
        )
    return replace(step, nodes=tuple(nodes))
