"""Capture one whole training step: forward, loss, backward and optimizer as one ranked list."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from lowtide.capture import recipes
from lowtide.capture.analyse import analyse
from lowtide.capture.identity import identify
from lowtide.capture.names import target_name
from lowtide.capture.optimizer import OptimizerTrace, trace_optimizer
from lowtide.capture.records import Analysis, Place
from lowtide.capture.tangents import tangent_outputs
from lowtide.capture.trace import Segment, Trace, name_tensors, storage_key, trace
from lowtide.errors import CaptureError
from lowtide.facts import Graph, How, Kind, Node, Region, Step
from lowtide.torchside import hooks
from lowtide.torchside.batch import split_batch

SCALARS_BYTES = 1024
OUTSIDE = (
    "the model or its loss runs differentiable code outside of its graphs that torch.compile does not "
    "follow; what that code itself holds is not counted"
)

logger = logging.getLogger("lowtide")

Values = Mapping[fx.Node, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """An op with the layouts of its arguments (fake tensors), to be timed."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(slots=True)
class Captured:
    """A step whose times are still zero, the op behind every rank, and the graphs themselves.

    `recipe_calls` has the ranks whose recompute runs another op than the first time.
    """

    step: Step
    calls: dict[int, Call]
    recipe_calls: dict[int, Call]
    places: dict[int, Place]
    segments: list[Segment]


def capture(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Captured:
    """Capture a step without running it. Needs the memory of the model, not of the step."""
    if not model.training:
        raise CaptureError("the model is in eval mode: call model.train() before capturing a training step")
    args, kwargs = split_batch(batch)
    traced = trace(model, args, kwargs, loss=loss)
    captured = captured_step(analyse(traced), traced, model, batch=(args, kwargs), optimizer=optimizer)
    if OUTSIDE in captured.step.notes:
        logger.warning("%s, so budgets are kept only for the rest", OUTSIDE)
    return captured


def captured_step(
    analysis: Analysis,
    traced: Trace,
    model: nn.Module,
    *,
    batch: Any = (),
    optimizer: torch.optim.Optimizer | None = None,
) -> Captured:
    """Facts and ops of analysed graphs, with all else that the step holds."""
    _add_unread(analysis, model, batch)
    _add_scalars(analysis, traced)
    calls = _calls(analysis.places, {})
    if optimizer is not None:
        _check_parameters(optimizer, model)
        _add_optimizer(analysis, trace_optimizer(optimizer, model, analysis.gradients), calls)
    step = Step(
        nodes=tuple(analysis.nodes),
        storages=tuple(analysis.storages),
        fingerprint="+".join(segment.fingerprint for segment in analysis.segments),
        device=_device(model),
        notes=_notes(analysis, traced),
        graphs=_graphs(analysis, traced),
        identity=identify(model, batch),
    )
    return Captured(
        step=step,
        calls=calls,
        recipe_calls=_recipe_calls(analysis.nodes, analysis.places, {}),
        places=analysis.places,
        segments=analysis.segments,
    )


def _graphs(analysis: Analysis, traced: Trace) -> tuple[Graph, ...]:
    return tuple(
        Graph(
            fingerprint=segment.fingerprint,
            in_model=index < traced.num_model_runs,
            returned=tuple(sorted(output for run, output in traced.returned if run == index)),
            missing=tuple(sorted(missing)),
            tangent_bytes=_tangent_bytes(segment, missing),
        )
        for index, (segment, missing) in enumerate(zip(analysis.segments, analysis.missing, strict=True))
    )


def _tangent_bytes(segment: Segment, missing: frozenset[int]) -> int:
    tangents = tangent_outputs(segment.joint)
    values = [node.meta["val"] for node, output in tangents.items() if output not in missing]
    return sum(value.numel() * value.element_size() for value in values)


def _check_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    known = {id(parameter) for parameter in model.parameters()}
    strangers = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
    if strangers:
        raise CaptureError(
            f"{strangers} of the optimizer's parameters do not belong to this model: "
            "make the optimizer from model.parameters() of the model that you pass"
        )


def _device(model: nn.Module) -> str:
    parameter = next(model.parameters(), None)
    return "cpu" if parameter is None else parameter.device.type


def _notes(analysis: Analysis, traced: Trace) -> tuple[str, ...]:
    notes = []
    if any(
        hooks.has_own_checkpoint(node) for segment in analysis.segments for node in segment.joint.graph.nodes
    ):
        notes.append(
            "the model calls torch.utils.checkpoint: its activations are planned like all others, and the "
            "peak without a plan is that of a model without these calls"
        )
    if traced.num_model_runs > 1:
        notes.append(
            f"the model breaks into {traced.num_model_runs} graphs; nothing is recomputed across them"
        )
    if traced.loss_outside or any(run.from_outside for run in traced.runs):
        notes.append(OUTSIDE)
    if traced.real_forward:
        notes.append("captured with one real forward pass, since the model's code reads tensor values")
    return tuple(notes)


def _add_scalars(analysis: Analysis, traced: Trace) -> None:
    """Python and autograd hold a few numbers around each graph that no graph shows."""
    for run in range(traced.num_model_runs):
        name = f"scalars around graph {run}"
        analysis.add_storage(nbytes=SCALARS_BYTES, kind=Kind.OTHER, name=name, static=True)


def _add_unread(analysis: Analysis, model: nn.Module, batch: Any) -> None:
    """Tensors that no graph reads are there all the same: unused parameters, buffers, inputs."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers(), *pytree.tree_leaves(batch))}
    origins = name_tensors(model, batch)
    read = [key for key, origin in origins.items() if origin.name in analysis.parameters]
    known = {storage_key(tensors[key]) for key in read}
    for key, origin in origins.items():
        storage = storage_key(tensors[key])
        if storage not in known:
            known.add(storage)
            nbytes = tensors[key].untyped_storage().nbytes()
            analysis.add_storage(nbytes=nbytes, kind=origin.kind, name=origin.name, static=True)


def with_values(captured: Captured, values: Values) -> Captured:
    """The same step, its ops called with other fake values of some nodes."""
    return replace(
        captured,
        calls=captured.calls | _calls(captured.places, values),
        recipe_calls=_recipe_calls(captured.step.nodes, captured.places, values),
    )


def _calls(places: Mapping[int, Place], values: Values) -> dict[int, Call]:
    calls = {}
    for rank, place in places.items():
        if place.node.op == "call_function":
            assert callable(place.node.target)
            args, kwargs = _filled((place.node.args, place.node.kwargs), values)
            calls[rank] = Call(place.node.target, tuple(args), dict(kwargs))
    return calls


def _filled(args: Any, values: Values) -> Any:
    """Arguments with the fake value of every node among them: the one given, else the captured one."""
    return fx.node.map_arg(args, lambda read: values.get(read, read.meta.get("val")))


def _recipe_calls(nodes: Sequence[Node], places: Mapping[int, Place], values: Values) -> dict[int, Call]:
    calls = {}
    for rank, place in places.items():
        recipe = nodes[rank].recipe
        if recipe is None:
            continue
        if recipe.how is How.NO_STATS:
            target, args = recipes.without_statistics(place.node)
            calls[rank] = Call(target, tuple(_filled(args, values)), {})
        elif recipe.how is How.MASK:
            pair = recipes.dropout_output(place.node)
            assert pair is not None
            dropout = place.node.args[0]
            assert isinstance(dropout, fx.Node)
            calls[rank] = Call(recipes.apply_mask, (*_filled(pair, values), dropout.args[1]), {})
    return calls


def _add_optimizer(analysis: Analysis, traced: OptimizerTrace, calls: dict[int, Call]) -> None:
    """Append the optimizer's ops. A temporary that its Python code still holds counts as read there."""
    storage: dict[int, int] = {}
    maker: dict[int, int] = {}
    for key, name in traced.parameters.items():
        if name in analysis.parameters:
            storage[key] = analysis.parameters[name]
    for key, name in traced.gradients.items():
        storage[key] = analysis.gradients[name]
    for position, key in enumerate(traced.state):
        storage[key] = analysis.add_storage(
            nbytes=traced.sizes[key], kind=Kind.OPTIMIZER_STATE, name=f"state_{position}", static=True
        )
    first = len(analysis.nodes)
    for position, op in enumerate(traced.ops):
        name = f"step_{position}.{_short(op.target)}"
        for key in op.makes:
            storage[key] = analysis.add_storage(nbytes=traced.sizes[key], kind=Kind.OTHER, name=name)
            maker[key] = first + position
        makes = tuple(storage[key] for key in op.makes)
        used = [key for key in (*op.reads, *op.frees) if key in maker and key not in op.makes]
        rank = analysis.add_node(
            name=name,
            op=target_name(op.target),
            region=Region.OPTIMIZER,
            kind=Kind.OTHER,
            reads=tuple(dict.fromkeys(maker[key] for key in used)),
            holds=makes,
            makes=makes,
        )
        calls[rank] = Call(op.target, op.args, op.kwargs)


def _short(target: Any) -> str:
    return str(getattr(target, "_opname", target))


def with_costs(
    step: Step, costs: dict[int, tuple[float, int, bool]], recipe_costs: dict[int, tuple[float, int, bool]]
) -> Step:
    """The step with (seconds, workspace bytes, estimated) of every rank filled in."""
    nodes = []
    for node in step.nodes:
        seconds, workspace, estimated = costs.get(node.rank, (0.0, 0, False))
        recipe = node.recipe
        if recipe is not None:
            again, inside, _ = recipe_costs.get(node.rank, (seconds, workspace, estimated))
            recipe = replace(recipe, seconds=again, workspace_bytes=recipe.workspace_bytes + inside)
        nodes.append(
            replace(node, seconds=seconds, workspace_bytes=workspace, estimated=estimated, recipe=recipe)
        )
    return replace(step, nodes=tuple(nodes))
