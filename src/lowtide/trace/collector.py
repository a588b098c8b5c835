"""A torch.compile backend that keeps the joint graphs of a model and returns fake results.

Dynamo graph ──> Collector ──> AOTAutograd ──> Segment
                    │
model code <── fake results <── Execution, one per call of the graph
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import fx, nn

from lowtide.errors import CaptureError
from lowtide.facts import Kind, Region
from lowtide.facts.gpus import Gpu
from lowtide.facts.sharding import Passage
from lowtide.ops.absent_gpu import use_gpu_attention, use_gpu_autocast
from lowtide.ops.calls import call_of, value_of
from lowtide.ops.live_ranges import live_bytes
from lowtide.ops.random_ops import draw_high
from lowtide.torch_compat import aot_autograd, dispatch, dynamo
from lowtide.torch_compat.aot_autograd import Orders
from lowtide.torch_compat.autograd_engine import version_of
from lowtide.torch_compat.dispatch import iter_tensors, storage_key
from lowtide.trace.failures import NOT_THE_USERS
from lowtide.trace.identity import (
    Origin,
    describe_inputs,
    key_of,
    name_modules,
    name_tensors,
    origins_of_run,
    own_origins,
    user_tensors,
)
from lowtide.trace.model_call import tensors_in
from lowtide.trace.python_frames import outputs_in_frames
from lowtide.trace.segments import (
    Execution,
    Function,
    GraphBinding,
    GraphFunctions,
    Segment,
    TracedGraph,
    new_segment,
)
from lowtide.trace.uncaptured import UncapturedPoint, UncapturedWatch, leaves_behind


class Collector:
    """A torch.compile backend that keeps every joint graph and computes nothing, unless it is `real`.

    `forward_bytes`: the most bytes live in one of the forward graphs so far when it is run for real.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        *,
        real: bool,
        gpu: Gpu | None = None,
        watch: UncapturedWatch | None = None,
        orders: Orders | None = None,
    ) -> None:
        self.orders = orders or {}
        self.gpu = gpu
        self.uncaptured = watch
        """sees what uncaptured code makes; without a watch, all inputs and results of graphs stay live"""
        self.in_backward = False
        self.ran_backward = False
        self.received: set[tuple[int, int]] = set()
        """each (execution, output) that got a gradient in this backward pass"""
        self.live_in_autograd: set[tuple[int, int]] = set()
        """each (execution, output) whose gradient autograd keeps live as long as the loss"""
        self.model = model
        self.batch = batch
        self.real = real
        self.passages: list[Passage] = []
        self.segments: list[Segment] = []
        self.executions: list[Execution] = []
        self.forward_bytes = 0
        self.first_break = ""
        self.traced: TracedGraph | None = None
        """the last graph with a backward pass, if it reaches the end of the traced function"""
        self._made: dict[int, tuple[int, int]] = {}
        self._versions: dict[int, int] = {}
        """how often each of these storages had been changed when its graph ended"""
        self._alive: list[Any] = []
        self._mode: dispatch.FakeTensorMode | None = None
        self._bindings: list[GraphBinding] = []
        self._waiting: dict[int, list[int]] = {}
        """executions whose backward pass has not run yet, by segment"""

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        identity = id if self.uncaptured is None else storage_key
        named = name_tensors(self.model, self.batch)
        origins = describe_inputs(graph, named, stranger=Kind.OTHER, identity=identity)
        self._keep(dynamo.graph_inputs(graph))
        if self.gpu is not None:
            use_gpu_attention(graph, has_flash=self.gpu.has_flash)
            use_gpu_autocast(graph)
        casts_once = dynamo.casts_weights_once(graph)
        is_whole, key = dynamo.reaches_the_end(graph), key_of(graph)
        self.first_break = self.first_break or dynamo.break_line(graph, besides=NOT_THE_USERS)
        segment: Segment | None = None
        fakes: Sequence[Any] = ()
        binding: GraphBinding | None = None

        def partition(joint: fx.GraphModule, _args: Any, **kwargs: Any) -> Any:
            nonlocal segment
            outputs = kwargs["num_fwd_outputs"]
            name_modules(joint, self.model)
            segment = new_segment(joint, origins, num_forward_outputs=outputs, casts_once=casts_once)
            self.segments.append(segment)
            return _forward_alone(segment), aot_autograd.backward_stub(joint, segment.has_gradients)

        def forward(module: fx.GraphModule, args: Any) -> Callable[..., Any]:
            nonlocal binding, fakes
            assert segment is not None
            fakes, traced = args, segment
            bound = GraphBinding(
                GraphFunctions(self._runner(module, traced), lambda: self._fake_backward(traced))
            )
            binding = bound

            def run(values: list[Any]) -> Any:
                return bound.forward(values)

            return aot_autograd.takes_list(run)

        def backward(_module: fx.GraphModule, _args: Any) -> Callable[..., Any]:
            assert binding is not None
            return aot_autograd.takes_list(binding.backward())

        def inference(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
            alone = new_segment(module, origins, num_forward_outputs=None)
            self.segments.append(alone)
            return aot_autograd.takes_list(self._runner(module, alone))

        compiled_graph, borders = aot_autograd.compile_graph(
            graph,
            inputs,
            partition=partition,
            forward=forward,
            backward=backward,
            inference=inference,
            orders=self.orders,
        )
        if segment is None or binding is None:
            return borders.around(compiled_graph)
        binding.compiled_to(compiled_graph)
        self._bindings.append(binding)
        key = None if aot_autograd.is_guarded_by_aot() else key
        self.traced = TracedGraph(segment, fakes, key=key, binding=binding) if is_whole else None
        return borders.around(binding.run)

    def _runner(self, module: fx.GraphModule, segment: Segment) -> Function:
        outputs = module.graph.output_node().args[0]
        assert isinstance(outputs, (list, tuple))
        values = [_returned(node) if isinstance(node, fx.Node) else node for node in outputs]
        mutated = segment.mutated_inputs
        inputs = [node for node in module.graph.nodes if node.op in ("placeholder", "get_attr")]
        ops = [node for node in module.graph.nodes if node not in inputs]
        self.forward_bytes = max(self.forward_bytes, *live_bytes(ops, uncounted=inputs))
        if self.real:
            draw_high(module)

        def run(args: list[Any]) -> list[Any]:
            links = {
                index: self._made[storage_key(arg)]
                for index, arg in enumerate(args)
                if isinstance(arg, torch.Tensor) and storage_key(arg) in self._made
            }
            number = len(self.executions)
            own = self._own_origins(segment, args)
            origins = segment.origins if own is None else own
            strangers = {
                index: arg
                for index, (arg, origin) in enumerate(zip(args, origins, strict=False))
                if isinstance(arg, torch.Tensor) and origin.kind is Kind.OTHER
            }
            from_uncaptured = any(
                arg.requires_grad and (index not in links or not self._is_as_made(links[index], arg))
                for index, arg in strangers.items()
            )
            if self.uncaptured is not None:  # inputs of a graph are counted with the graph
                self.uncaptured.leave_out(arg for index, arg in strangers.items() if index not in links)
            held = outputs_in_frames(self._made)
            self.executions.append(
                Execution(segment, links, from_uncaptured=from_uncaptured, origins=own, in_frames=held)
            )
            self._waiting.setdefault(id(segment), []).append(number)
            with self._watch_paused():
                results = list(module(*args)) if self.real else [self._fake(value) for value in values]
            for index, source in mutated.items():
                # torch copies the result into the input. Buffers are restored after a capture, and code
                # between graphs may read a new value; all other inputs keep theirs
                if not self.real or origins[source].kind is not Kind.BUFFER:
                    results[index] = args[source]
            args.clear()
            made = {
                index: result
                for index, result in enumerate(results[: segment.num_forward_outputs])
                if isinstance(result, torch.Tensor) and index not in mutated
            }
            for index, result in made.items():
                self._made.setdefault(storage_key(result), (number, index))
                self._versions.setdefault(storage_key(result), version_of(result))
            self._keep(results)
            if self.uncaptured is not None:
                self.uncaptured.graph_ran(number, made)
            return results

        return run

    def _keep(self, values: Sequence[Any]) -> None:
        """Reserve the identities of these tensors as long as the capture lasts."""
        if self.uncaptured is None:
            self._alive.append(values)
        else:  # only the identities of their storages
            storages = [tensor.untyped_storage() for tensor in iter_tensors(list(values))]
            self._alive += [dispatch.StorageWeakRef(storage) for storage in storages]  # type: ignore[no-untyped-call]

    def _watch_paused(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.uncaptured is None else self.uncaptured.inside_of_graph()

    def _own_origins(self, segment: Segment, args: Sequence[Any]) -> list[Origin] | None:
        """The origins of the inputs of this run, if they can differ from those of the graph's first run."""
        if self.passages:
            return own_origins(self.model, segment, args)
        if self.uncaptured is None or id(segment) not in self._waiting:
            return None
        return origins_of_run(self._named, segment, args)

    @functools.cached_property
    def _named(self) -> dict[int, Origin]:
        """The user's name of each storage that the step starts from."""
        names = name_tensors(self.model, self.batch)
        tensors = user_tensors(self.model, self.batch)
        return {storage_key(tensor): names[id(tensor)] for tensor in tensors if id(tensor) in names}

    def _fake_backward(self, segment: Segment) -> Function:
        """A backward pass of a graph that computes nothing, for uncaptured code that reads its gradients."""
        values = [node and node.meta.get("val") for node in segment.gradients]
        outputs = list(segment.tangents.values())

        def run(args: list[Any]) -> list[Any]:
            if not self.in_backward or self.uncaptured is None:
                raise CaptureError(
                    "the model differentiates inside of its own forward (backward() or "
                    "torch.autograd.grad): lowtide plans steps with one backward pass, after the forward"
                )
            self.uncaptured.gradients_went(iter_tensors(args))
            number = self._waiting[id(segment)].pop()
            arrived = zip(outputs, args[-len(outputs) :] if outputs else (), strict=True)
            self.received |= {(number, output) for output, gradient in arrived if gradient is not None}
            args.clear()
            with self._watch_paused():
                gradients = [
                    self._zeros(value)
                    if isinstance(value, torch.Tensor) and origin.kind is Kind.OTHER
                    else None
                    for value, origin in zip(values, segment.origins, strict=False)
                ]
            self.uncaptured.move(UncapturedPoint(Region.BACKWARD, number))
            links = self.executions[number].links
            self.uncaptured.gradients_came(
                gradient
                for index, gradient in enumerate(gradients)
                if gradient is not None and (index not in links or not self._passes_on(links[index]))
            )
            return [*gradients, *[None] * (len(values) - len(gradients))]

        return run

    def _zeros(self, value: torch.Tensor) -> torch.Tensor:
        if self.real:
            strided = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            return strided.zero_()
        fake: torch.Tensor = self._fake(value)
        return fake

    def _fake(self, value: Any) -> Any:
        """A new fake tensor like this one. All have one mode, since ops do not mix two modes."""
        if not isinstance(value, dispatch.FakeTensor):
            return value
        self._mode = self._mode or value.fake_mode
        with self._mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    def run_backward(self, roots: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Run the backward pass of uncaptured code, with backward passes of graphs that compute nothing.
        Returns the gradients of parameters, by the parameter's identity."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        own = {id(parameter) for parameter in parameters}
        # tensors of the batch, or made by uncaptured code, may get a gradient that stays live
        others = [leaf for leaf in leaves_behind(roots) if id(leaf) not in own]
        leaves = [*parameters, *others]
        self.live_in_autograd = {place for leaf in others if (place := self.where(leaf)) is not None}
        num_executions = len(self.executions)
        self.in_backward = self.ran_backward = True
        try:
            with self._watch_paused():
                seeds = [torch.ones_like(root) for root in roots]
            found = torch.autograd.grad(roots, leaves, seeds, allow_unused=True)
            if len(self.executions) != num_executions:
                raise RuntimeError("a forward pass inside of the backward pass")
        finally:
            self.in_backward = False
            del self.executions[num_executions:]
        self._alive.append(found)
        pairs = zip(parameters, found, strict=False)
        return {id(parameter): gradient for parameter, gradient in pairs if gradient is not None}

    def _passes_on(self, place: tuple[int, int]) -> bool:
        """Whether a gradient reaches the graph that made a value. None reaches a graph inside of the forward
        of a `torch.autograd.Function`, whose own backward is uncaptured."""
        return self.executions[place[0]].segment.differentiable

    def _is_as_made(self, place: tuple[int, int], value: torch.Tensor) -> bool:
        """Whether a value that requires a gradient is still the output that a graph made. Uncaptured code may
        have written into the output since (`index_add_`)."""
        return self._passes_on(place) and version_of(value) == self._versions.get(storage_key(value), 0)

    def note_passage(self, unit: int, begins: bool, tensors: Any) -> None:
        """Record that a unit of the model begins or ends its forward."""
        differentiable = any(tensor.requires_grad for tensor in tensors_in(tensors))
        self.passages.append(Passage(unit, begins, len(self.executions), differentiable))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Free the results: through autograd they keep their inputs live until garbage is collected. Where a
        model breaks into graphs, Dynamo keeps its code between them, and with it the collector, but not the
        batch of a user who trains on others."""
        self.batch = ()
        self._made.clear()
        self._alive.clear()
        for binding in self._bindings:
            binding.end_capture()

    def known(self, model: nn.Module, batch: Any) -> set[int]:
        """Storages that are counted anyway: of the user's tensors, and of the graphs' results."""
        return {*self._made, *(storage_key(tensor) for tensor in user_tensors(model, batch))}

    def where(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """The (execution, output) that made this tensor."""
        return self._made.get(storage_key(tensor))


def _returned(node: fx.Node) -> Any:
    """The fake value of an output; a number that torch returns as a tensor is real."""
    if node.target is torch.ops.aten.scalar_tensor.default:
        made = call_of(node)
        if not isinstance(made.args[0], torch.Tensor):
            with dispatch.real_tensors():
                return made.target(*made.args, **made.kwargs)
    return value_of(node)


def _forward_alone(segment: Segment) -> fx.GraphModule:
    """The forward part of a joint graph, which saves nothing for a backward pass."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in (*segment.primals, *segment.forward_ops):
        new[node] = graph.node_copy(node, new.__getitem__)
    results = segment.joint.graph.output_node().args[0]
    assert isinstance(results, (list, tuple))
    outputs = results[: segment.num_forward_outputs]
    graph.output([new[value] if isinstance(value, fx.Node) else value for value in outputs])
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op == "placeholder" or node.is_impure())
    return aot_autograd.graph_module(segment.joint, graph)
