"""Trace a model's forward and backward pass into joint graphs, without running either.

Dynamo and AOTAutograd trace the model on fake tensors. Where a model breaks into several graphs,
the first one hands fake outputs to the second, so nothing is computed and no memory is needed.
Only a model whose Python code looks at values between two graphs needs a real forward pass.
"""

import contextlib
import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from lowtide.capture import failures, forecast
from lowtide.capture.as_eager import as_eager_computes
from lowtide.capture.fingerprint import fingerprint
from lowtide.capture.recipes import is_random
from lowtide.capture.tangents import tangent_outputs
from lowtide.capture.untouched import untouched
from lowtide.errors import CaptureError, LowtideError
from lowtide.facts import Kind
from lowtide.facts.sizes import format_size
from lowtide.torchside import hooks
from lowtide.torchside.batch import own_loss, sum_of_floats, tensors_in

logger = logging.getLogger("lowtide")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a graph's input comes from: a kind and a name for the user."""

    kind: Kind
    name: str


@dataclass(slots=True)
class Segment:
    """One captured graph: forward and backward in one, as AOTAutograd gives it.

    `differentiable` is False where nothing needs a gradient; the graph is then forward only.
    """

    joint: fx.GraphModule
    num_forward_outputs: int
    origins: list[Origin]
    differentiable: bool
    fingerprint: str


@dataclass(slots=True)
class Run:
    """One execution of a segment. `links[i]` names the earlier output that input i is: (run, output).

    `from_outside`: some input was made by code between the graphs, and has a gradient to pass on.
    """

    segment: Segment
    links: dict[int, tuple[int, int]] = field(default_factory=dict)
    from_outside: bool = False


@dataclass(slots=True)
class Trace:
    """All graphs of one forward pass in the order they ran.

    `returned` are the (run, output) that the caller holds; `given` those whose gradient comes from
    outside of the graphs: the loss. `loss_outside`: the loss itself was made outside of them, so that
    nobody can tell which outputs it reads, and all of them may get a gradient.
    """

    runs: list[Run]
    returned: frozenset[tuple[int, int]]
    given: frozenset[tuple[int, int]]
    num_model_runs: int
    real_forward: bool = False
    loss_outside: bool = False


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for two living tensors exactly when they share memory, fake ones included."""
    return int(tensor.untyped_storage()._cdata)


def results_of(graph: fx.GraphModule) -> list[fx.Node | None]:
    """What a graph returns, in order; None where it returns nothing or a constant."""
    results = graph.graph.output_node().args[0]
    assert isinstance(results, (list, tuple))
    return [result if isinstance(result, fx.Node) else None for result in results]


class Collector:
    """A torch.compile backend that keeps every joint graph and computes nothing, unless it is `real`.

    `forward_bytes`: the most that one of the forward graphs so far holds when it is run for real.
    """

    def __init__(self, *, origins: Mapping[int, Origin], real: bool) -> None:
        self.origins = origins
        self.real = real
        self.segments: list[Segment] = []
        self.runs: list[Run] = []
        self.forward_bytes = 0
        self._made: dict[int, tuple[int, int]] = {}
        self._alive: list[Any] = []

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        origins = describe_inputs(graph, self.origins, stranger=Kind.OTHER)
        segment: Segment | None = None

        def partition(joint: fx.GraphModule, args: Any, **kwargs: Any) -> Any:
            nonlocal segment
            segment = new_segment(joint, origins, num_forward_outputs=kwargs["num_fwd_outputs"])
            self.segments.append(segment)
            # torch's partitioner, which only has to make something that runs here, fails on these
            joint.graph.eliminate_dead_code(is_impure_node=_is_needed)
            return hooks.default_partition(joint, args, **kwargs)

        def forward(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
            assert segment is not None
            return self._runner(module, segment)

        def inference(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
            alone = new_segment(module, origins, num_forward_outputs=None)
            self.segments.append(alone)
            return self._runner(module, alone)

        return hooks.compile_graph(
            graph, inputs, partition=partition, forward=forward, backward=_never_run, inference=inference
        )

    def _runner(self, module: fx.GraphModule, segment: Segment) -> Callable[..., Any]:
        outputs = module.graph.output_node().args[0]
        assert isinstance(outputs, (list, tuple))
        values = [node.meta.get("val") if isinstance(node, fx.Node) else node for node in outputs]
        mutated = mutated_inputs(segment.joint)
        alone = _without_saving(module, segment.num_forward_outputs)
        self.forward_bytes = max(self.forward_bytes, forecast.peak_bytes(alone.graph))

        def run(args: list[Any]) -> list[Any]:
            links = {
                index: self._made[storage_key(arg)]
                for index, arg in enumerate(args)
                if isinstance(arg, torch.Tensor) and storage_key(arg) in self._made
            }
            from_outside = any(
                isinstance(arg, torch.Tensor) and arg.requires_grad and origin.kind is Kind.OTHER
                for index, (arg, origin) in enumerate(zip(args, segment.origins, strict=False))
                if index not in links
            )
            self.runs.append(Run(segment, links, from_outside=from_outside))
            if self.real:
                results = list(alone(*args))
                results += [torch.empty(0)] * (len(values) - len(results))
            else:
                results = [_fresh_fake(value) for value in values]
            for index, source in mutated.items():
                results[index] = args[source]  # torch copies this into the input: leave it as it is
            args.clear()
            for index, result in enumerate(results[: segment.num_forward_outputs]):
                if isinstance(result, torch.Tensor) and index not in mutated:
                    self._made.setdefault(storage_key(result), (len(self.runs) - 1, index))
            self._alive.append(results)
            return results

        return hooks.takes_list(run)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let the results go: through autograd they hold what made them, where no garbage is collected."""
        self._made.clear()
        self._alive.clear()

    def where(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """The (run, output) that made this tensor."""
        return self._made.get(storage_key(tensor))


def _is_needed(node: fx.Node) -> bool:
    """Whether an op stays though nobody reads its result; a random one need not, where nothing is kept."""
    return node.op in ("placeholder", "output") or (node.is_impure() and not is_random(node))


def mutated_inputs(joint: fx.GraphModule) -> dict[int, int]:
    """Forward outputs that are new values of an input (batch-norm statistics): output to input index."""
    descriptions = joint.graph.output_node().meta.get("desc") or []
    return {
        index: description.mutated_input.idx
        for index, description in enumerate(descriptions)
        if isinstance(description, hooks.InputMutationAOTOutput)
        and isinstance(description.mutated_input, hooks.PlainAOTInput)
    }


def new_segment(joint: fx.GraphModule, origins: list[Origin], *, num_forward_outputs: int | None) -> Segment:
    """A segment with a graph of its own; None outputs means a graph without backward."""
    new = fx.Graph()
    result = new.graph_copy(joint.graph, {}, return_output_node=True)
    assert isinstance(result, tuple)
    value, output = result
    new.output(value).meta = dict(output.meta)
    as_eager_computes(new)
    graph = fx.GraphModule(joint, new)
    weights = [origin.name for origin in origins if origin.kind in (Kind.PARAMETER, Kind.BUFFER)]
    return Segment(
        joint=graph,
        num_forward_outputs=len(results_of(graph)) if num_forward_outputs is None else num_forward_outputs,
        origins=origins,
        differentiable=num_forward_outputs is not None,
        fingerprint=fingerprint(graph, num_forward_outputs, weights),
    )


def describe_inputs(graph: fx.GraphModule, origins: Mapping[int, Origin], *, stranger: Kind) -> list[Origin]:
    """Where each input of a graph comes from; `stranger` is the kind of what `origins` does not know."""
    names = [str(node.target) for node in graph.graph.find_nodes(op="placeholder")]
    return [
        origins.get(id(example), Origin(stranger, name))
        for name, example in zip(names, hooks.graph_inputs(graph), strict=True)
    ]


def name_tensors(model: nn.Module, batch: Any) -> dict[int, Origin]:
    """What the user calls each tensor that a step reads, by identity."""
    origins: dict[int, Origin] = {}
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, torch.Tensor):
            origins[id(leaf)] = Origin(Kind.INPUT, _path_name(path))
    for name, buffer in model.named_buffers():
        origins[id(buffer)] = Origin(Kind.BUFFER, name)
    for name, parameter in model.named_parameters():
        origins[id(parameter)] = Origin(Kind.PARAMETER, name)
    return origins


def real_tensors(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """The tensors themselves by the names that `name_tensors` gives them."""
    every = (*model.parameters(), *model.buffers(), *pytree.tree_leaves(batch))
    by_identity = {id(tensor): tensor for tensor in every if isinstance(tensor, torch.Tensor)}
    return {origin.name: by_identity[key] for key, origin in name_tensors(model, batch).items()}


def _path_name(path: tuple[Any, ...]) -> str:
    """`input_ids` for a keyword argument, `input_0` for a positional one."""
    keys = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path[1:]]
    name = ".".join(keys)
    return f"input_{name}" if name[:1].isdigit() else name


def call_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function that is compiled, at capture and at run time, so that both give the same graphs."""
    return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss: Callable[[Any], torch.Tensor] | None,
) -> Trace:
    """Trace one forward pass and its loss; the real forward only where fake values are not enough."""
    collector = Collector(origins=name_tensors(model, (args, kwargs)), real=False)
    try:
        with collector:
            return _trace(model, args, kwargs, loss=loss, collector=collector)
    except failures.NeedsValues as wanted:
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
    with Collector(origins=name_tensors(model, (args, kwargs)), real=True) as collector:
        return _trace(model, args, kwargs, loss=loss, collector=collector)


def _trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss: Callable[[Any], torch.Tensor] | None,
    collector: Collector,
) -> Trace:
    with (
        untouched(model, values=collector.real),
        hooks.quiet(),
        hooks.compiling(),
        hooks.forgotten(),
        torch.enable_grad(),
    ):
        breaks = hooks.graph_breaks()
        with failures.explained("the model"), _values_if_needed(collector):
            output = _compiled(call_model, collector)(model, args, kwargs)
        num_model_runs = len(collector.runs)
        if not num_model_runs:
            raise CaptureError(failures.nothing_captured(hooks.graph_breaks() - breaks))
        returned = frozenset(
            place for leaf in tensors_in(output) if (place := collector.where(leaf)) is not None
        )
        value = own_loss(output) if loss is None else None
        if value is None:
            with failures.explained("the loss"), _values_if_needed(collector):
                value = _compiled(loss or sum_of_floats, collector)(output)
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
    every = {
        (index, output)
        for index, run in enumerate(collector.runs)
        for output in tangent_outputs(run.segment.joint).values()
    }
    return Trace(
        runs=collector.runs,
        returned=returned if place is None else returned | {place},
        given=frozenset(every if place is None else {place}),
        num_model_runs=num_model_runs,
        real_forward=collector.real,
        loss_outside=place is None,
    )


@contextlib.contextmanager
def _values_if_needed(collector: Collector) -> Iterator[None]:
    """Code between two graphs that fails on fake values may well run on real ones."""
    try:
        yield
    except (LowtideError, hooks.TorchDynamoException):
        raise
    except Exception as error:
        if collector.real or not collector.runs:
            raise
        raise failures.NeedsValues(failures.describe(error)) from error


def _compiled(function: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(function, types.FunctionType) and function.__closure__ is None:
        function = hooks.own_code(function)
    compiled: Callable[..., Any] = torch.compile(function, backend=hooks.weakly(backend), dynamic=False)
    return compiled


def _fresh_fake(value: Any) -> Any:
    if not isinstance(value, hooks.FakeTensor):
        return value
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _without_saving(module: fx.GraphModule, num_forward_outputs: int) -> fx.GraphModule:
    """A forward graph that returns its outputs alone, and nothing for a backward pass."""
    graph = fx.Graph()
    results = graph.graph_copy(module.graph, {})
    assert isinstance(results, (list, tuple))
    graph.output(list(results[:num_forward_outputs]))
    alone = fx.GraphModule(module, graph)
    alone.graph.eliminate_dead_code(is_impure_node=lambda node: node.op == "placeholder" or node.is_impure())
    alone.recompile()
    return alone


def _never_run(_module: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
    def run(_args: list[Any]) -> None:
        raise CaptureError(
            "the model differentiates inside of its own forward (backward() or torch.autograd.grad): "
            "lowtide plans steps with one backward pass, after the forward"
        )

    return hooks.takes_list(run)
