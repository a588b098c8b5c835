"""Trace a model's forward and backward pass into joint graphs, without running either.

Dynamo and AOTAutograd trace the model on fake tensors. Where a model breaks into several graphs,
the first one hands fake outputs to the second, so nothing is computed and no memory is needed.
Only a model whose Python code looks at values between two graphs needs a real forward pass.
"""

import contextlib
import logging
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import fx, nn

from lowtide.capture import failures, forecast
from lowtide.capture.graphs import (
    Execution,
    Segment,
    Trace,
    describe_inputs,
    has_gradients,
    mutated_inputs,
    name_tensors,
    new_segment,
    own_origins,
    user_tensors,
)
from lowtide.capture.on_paper import Paper
from lowtide.capture.regions import split
from lowtide.capture.tangents import tangent_outputs
from lowtide.capture.traced import Function, TracedGraph, TracedModel
from lowtide.capture.untouched import untouched
from lowtide.errors import CaptureError, LowtideError
from lowtide.facts import Kind
from lowtide.facts.devices import Gpu
from lowtide.facts.sharding import Passage
from lowtide.facts.units import format_size
from lowtide.torchside import dynamo, hooks, sharded
from lowtide.torchside.batch import own_loss, sum_of_floats, tensors_in
from lowtide.torchside.calls import storage_key
from lowtide.torchside.graph_key import key_of
from lowtide.torchside.ops.gpu_attention import use_gpu_attention
from lowtide.torchside.ops.random import draw_high
from lowtide.torchside.outside import held_outside
from lowtide.torchside.tracing import compiled
from lowtide.torchside.units import compiled_model

logger = logging.getLogger("lowtide")


class Collector:
    """A torch.compile backend that keeps every joint graph and computes nothing, unless it is `real`.

    `forward_bytes`: the most that one of the forward graphs so far holds when it is run for real.
    """

    def __init__(self, model: nn.Module, batch: Any, *, real: bool, gpu: Gpu | None = None) -> None:
        self.gpu = gpu
        self.model = model
        self.batch = batch
        self.real = real
        self.passages: list[Passage] = []
        self.segments: list[Segment] = []
        self.executions: list[Execution] = []
        self.forward_bytes = 0
        self.traced: TracedGraph | None = None
        """the last graph with a backward pass that reaches to the end of what is traced"""
        self._made: dict[int, tuple[int, int]] = {}
        self._alive: list[Any] = []

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        origins = describe_inputs(graph, name_tensors(self.model, self.batch), stranger=Kind.OTHER)
        # alive as long as the capture, so that no other tensor gets the identity of one of them
        self._alive.append(hooks.graph_inputs(graph))
        if self.gpu is not None:
            use_gpu_attention(graph, has_flash=self.gpu.has_flash)
        casts_once = hooks.casts_weights_once(graph)
        is_whole, key = hooks.reaches_the_end(graph), key_of(graph)
        segment: Segment | None = None
        traced: TracedGraph | None = None

        def partition(joint: fx.GraphModule, _args: Any, **kwargs: Any) -> Any:
            nonlocal segment
            outputs = kwargs["num_fwd_outputs"]
            segment = new_segment(joint, origins, num_forward_outputs=outputs, casts_once=casts_once)
            self.segments.append(segment)
            gradients = has_gradients(joint, outputs)
            return _forward_alone(segment), hooks.backward_stub(joint, gradients)

        def forward(module: fx.GraphModule, args: Any) -> Callable[..., Any]:
            nonlocal traced
            assert segment is not None
            traced = TracedGraph(
                segment,
                inputs=args,
                forward=self._runner(module, segment),
                backward=_never_run,
                gradients=has_gradients(segment.joint, segment.num_forward_outputs),
            )
            self.traced = traced if is_whole else None

            def run(values: list[Any]) -> Any:
                return traced.forward(values)

            return hooks.takes_list(run)

        def backward(_module: fx.GraphModule, _args: Any) -> Callable[..., Any]:
            assert traced is not None
            return hooks.takes_list(traced.backward())

        def inference(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
            alone = new_segment(module, origins, num_forward_outputs=None)
            self.segments.append(alone)
            return hooks.takes_list(self._runner(module, alone))

        compiled_graph = hooks.compile_graph(
            graph, inputs, partition=partition, forward=forward, backward=backward, inference=inference
        )
        if traced is None:
            return compiled_graph
        traced.compiled = compiled_graph
        traced.key = None if hooks.is_guarded_by_aot() else key
        return traced.run

    def _runner(self, module: fx.GraphModule, segment: Segment) -> Function:
        outputs = module.graph.output_node().args[0]
        assert isinstance(outputs, (list, tuple))
        values = [node.meta.get("val") if isinstance(node, fx.Node) else node for node in outputs]
        mutated = mutated_inputs(segment.joint)
        self.forward_bytes = max(self.forward_bytes, forecast.peak_bytes(module.graph))
        if self.real:
            draw_high(module)

        def run(args: list[Any]) -> list[Any]:
            links = {
                index: self._made[storage_key(arg)]
                for index, arg in enumerate(args)
                if isinstance(arg, torch.Tensor) and storage_key(arg) in self._made
            }
            from_outside = any(
                isinstance(arg, torch.Tensor) and arg.requires_grad and origin.kind is Kind.OTHER
                for index, (arg, origin) in enumerate(zip(args, segment.origins, strict=False))
                if index not in links or not self._passes_on(links[index])
            )
            origins = own_origins(self.model, segment, args) if self.passages else None
            self.executions.append(Execution(segment, links, from_outside=from_outside, origins=origins))
            results = list(module(*args)) if self.real else [_fresh_fake(value) for value in values]
            for index, source in mutated.items():
                results[index] = args[source]  # torch copies this into the input: leave it as it is
            args.clear()
            for index, result in enumerate(results[: segment.num_forward_outputs]):
                if isinstance(result, torch.Tensor) and index not in mutated:
                    self._made.setdefault(storage_key(result), (len(self.executions) - 1, index))
            self._alive.append(results)
            return results

        return run

    def _passes_on(self, place: tuple[int, int]) -> bool:
        """Whether a gradient reaches the graph that made a value: none that ran inside of the forward of a
        `torch.autograd.Function`, whose own backward is outside of the graphs."""
        return self.executions[place[0]].segment.differentiable

    def watch(self, unit: int, begins: bool, tensors: Any) -> None:
        """A unit of the model begins or ends its forward."""
        differentiable = any(tensor.requires_grad for tensor in tensors_in(tensors))
        self.passages.append(Passage(unit, begins, len(self.executions), differentiable))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let the results go: through autograd they hold what made them, where no garbage is collected."""
        self._made.clear()
        self._alive.clear()

    def known(self, model: nn.Module, batch: Any) -> set[int]:
        """Storages that are counted anyway: of the user's tensors, and of what the graphs returned."""
        return {*self._made, *(storage_key(tensor) for tensor in user_tensors(model, batch))}

    def where(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """The (execution, output) that made this tensor."""
        return self._made.get(storage_key(tensor))


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss: Callable[[Any], torch.Tensor] | None,
    any_loss: bool = False,
    paper: Paper | None = None,
    gpu: Gpu | None = None,
) -> Trace:
    """Trace one forward pass and its loss; the real forward only where fake values are not enough.

    With `any_loss` there may be no `loss` that takes this output: then the loss is left out, and every
    output may get a gradient.
    """
    collector = Collector(model, (args, kwargs), real=False, gpu=gpu)
    try:
        with collector:
            return _trace(model, args, kwargs, loss=loss, any_loss=any_loss, collector=collector, paper=paper)
    except failures.NeedsValues as wanted:
        if gpu is not None:
            raise CaptureError(
                f"the model's Python code needs real values between two graphs ({wanted}), which only the "
                f"{gpu.words} could give: plan it there, or put what reads them behind @torch._dynamo.disable"
            ) from None
        if any_loss and sharded.units_of(model):
            raise CaptureError(
                f"the model's Python code needs real values between two graphs ({wanted}), which one process "
                "cannot have alone: pad its batches to the shape that was planned on all of them"
            ) from None
        own = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        logger.warning(
            "the model's Python code needs real values between two graphs (%s): capturing it runs one real "
            "forward pass now, without saved activations. It takes at least %s: %s of parameters and "
            "buffers, and %s for the largest graph so far",
            wanted,
            format_size(own + collector.forward_bytes),
            format_size(own),
            format_size(collector.forward_bytes),
        )
    with Collector(model, (args, kwargs), real=True) as collector:
        return _trace(model, args, kwargs, loss=loss, any_loss=any_loss, collector=collector, paper=paper)


def _trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss: Callable[[Any], torch.Tensor] | None,
    any_loss: bool,
    collector: Collector,
    paper: Paper | None,
) -> Trace:
    with (
        untouched(model),
        sharded.called_once(model, alone=not collector.real),
        hooks.quiet(),
        dynamo.forgotten() as kept,
        torch.enable_grad(),
    ):
        breaks = dynamo.graph_breaks()
        with failures.explained("the model"), _values_if_needed(collector):
            units = paper.units if paper is not None else ()
            call = compiled_model(model, collector, units=units, watch=collector.watch)
            output = call(model, args, kwargs)
        num_in_model = len(collector.executions)
        sharding = paper.sharding if paper is not None else sharded.sharding_of(model)
        traced = None
        if (
            isinstance(call, dynamo.Compiled)
            and num_in_model == 1
            and collector.traced is not None
            and not collector.real
        ):
            traced = TracedModel(model, call, collector.traced)
            call.take_graphs_along()
            kept.append(call)
        if not num_in_model:
            raise CaptureError(failures.nothing_captured(dynamo.graph_breaks() - breaks))
        returned = frozenset(
            place
            for leaf in tensors_in((output, [vars(module) for module in model.modules()]))
            if (place := collector.where(leaf)) is not None
        )
        if num_in_model == 1 and collector.traced is not None:
            # what a graph returns that goes to the end, and is not in the output, somebody else asked for
            segment = collector.traced.segment
            changed = mutated_inputs(segment.joint)
            returned |= {(0, place) for place in range(segment.num_forward_outputs) if place not in changed}
        value = own_loss(output) if loss is None else None
        if value is None and any_loss:
            value = _loss_if_it_fits(loss, output, collector)
            if value is None:
                alone = _without_loss(collector.executions[:num_in_model], returned, real=collector.real)
                return replace(alone, sharding=sharding, passages=collector.passages)
        elif value is None:
            with failures.explained("the loss"), _values_if_needed(collector):
                value = _compiled(loss or sum_of_floats, collector)(output)
        outside = held_outside(
            tensors_in((output, value)),
            collector.known(model, (args, kwargs)),
            num_graphs=sum(execution.segment.differentiable for execution in collector.executions),
        )
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        raise CaptureError(
            "the loss does not depend on any parameter that requires a gradient: "
            "pass `loss=` a function of the model's output that returns a scalar"
        )
    if value.numel() != 1:
        raise CaptureError(
            f"the loss has shape {tuple(value.shape)}, not one element: "
            "pass `loss=` a function that returns a scalar"
        )
    place = collector.where(value)
    return Trace(
        executions=collector.executions,
        returned=returned if place is None else returned | {place},
        given=_every_output(collector.executions) if place is None else frozenset({place}),
        num_in_model=num_in_model,
        real_forward=collector.real,
        loss_outside=place is None,
        outside_bytes=outside,
        traced=traced,
        sharding=sharding,
        passages=collector.passages,
    )


def _every_output(executions: Sequence[Execution]) -> frozenset[tuple[int, int]]:
    """All that can get a gradient."""
    return frozenset(
        (index, output)
        for index, execution in enumerate(executions)
        for output in tangent_outputs(execution.segment.joint).values()
    )


def _without_loss(executions: list[Execution], returned: frozenset[tuple[int, int]], *, real: bool) -> Trace:
    """A model's own graphs, where any of its outputs may get a gradient."""
    return Trace(
        executions=executions,
        returned=returned,
        given=_every_output(executions) & returned,
        num_in_model=len(executions),
        real_forward=real,
    )


def _loss_if_it_fits(
    loss: Callable[[Any], torch.Tensor] | None, output: Any, collector: Collector
) -> torch.Tensor | None:
    """The loss of an output that it was not made for: targets of another batch, say, do not fit."""
    if loss is None:
        return None
    try:
        value = _compiled(loss, collector)(output)
    except Exception:
        return None
    return value if isinstance(value, torch.Tensor) and value.requires_grad and value.numel() == 1 else None


@contextlib.contextmanager
def _values_if_needed(collector: Collector) -> Iterator[None]:
    """Code between two graphs that fails on fake values may well run on real ones."""
    try:
        yield
    except (LowtideError, hooks.TorchDynamoException):
        raise
    except Exception as error:
        if collector.real or not collector.executions:
            raise
        raise failures.NeedsValues(failures.describe(error)) from error


def _compiled(function: Callable[..., Any], backend: Callable[..., Any]) -> dynamo.Compiled:
    if isinstance(function, types.FunctionType) and function.__closure__ is None:
        function = dynamo.own_code(function)
    return compiled(function, backend)


def _fresh_fake(value: Any) -> Any:
    if not isinstance(value, hooks.FakeTensor):
        return value
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _forward_alone(segment: Segment) -> fx.GraphModule:
    """The forward part of a joint graph, which saves nothing for a backward pass."""
    tangents = tangent_outputs(segment.joint)
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    inputs = (node for node in segment.joint.graph.find_nodes(op="placeholder") if node not in tangents)
    for node in (*inputs, *split(segment)[0]):
        new[node] = graph.node_copy(node, new.__getitem__)
    results = segment.joint.graph.output_node().args[0]
    assert isinstance(results, (list, tuple))
    outputs = results[: segment.num_forward_outputs]
    graph.output([new[value] if isinstance(value, fx.Node) else value for value in outputs])
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op == "placeholder" or node.is_impure())
    return hooks.graph_module(segment.joint, graph)


def _never_run() -> Function:
    def run(_args: list[Any]) -> None:
        raise CaptureError(
            "the model differentiates inside of its own forward (backward() or torch.autograd.grad): "
            "lowtide plans steps with one backward pass, after the forward"
        )

    return run
