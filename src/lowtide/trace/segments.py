"""Tell graphs apart: the same model, shapes and torch give the same fingerprint.

Captured graphs: joint graphs of forward and backward, where their inputs come from, how they follow
each other.

A model that was traced once, at capture, and waits for the plan that it will run by.
"""

import hashlib
import operator
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from lowtide.facts import Kind
from lowtide.facts.sharding import Passage, Sharding
from lowtide.ops.calls import target_name
from lowtide.ops.gradient_terms import CAST_ONCE
from lowtide.ops.passes import as_eager_computes
from lowtide.torch_compat import aot_autograd, dynamo
from lowtide.torch_compat.dispatch import storage_key
from lowtide.torch_compat.dynamo import Compiled
from lowtide.torch_compat.fsdp2 import gathered, local
from lowtide.trace.model_call import tensors_in
from lowtide.trace.uncaptured import UncapturedCode


def structure(graph: fx.GraphModule) -> str:
    """A short hash of a graph's ops and of which values each reads, whatever their shapes and numbers."""
    index = {node: position for position, node in enumerate(graph.graph.nodes)}
    digest = hashlib.sha256()
    for node in graph.graph.nodes:
        reads = " ".join(str(index[source]) for source in node.all_input_nodes)
        part = node.args[1] if node.target is operator.getitem else ""
        target = "" if node.op == "placeholder" else target_name(node.target)
        digest.update(f"{node.op} {target} {part} {reads}\n".encode())
    return digest.hexdigest()[:16]


def fingerprint(graph: fx.GraphModule, num_forward_outputs: int | None, weights: Iterable[str]) -> str:
    """A short hash of a graph's ops, their order, arguments and the shapes they make, and of the names of
    the parameters and buffers that it reads: equal blocks of one model are told apart.
    """
    index = {node: position for position, node in enumerate(graph.graph.nodes)}

    def plain(value: Any) -> str:
        if isinstance(value, fx.Node):
            return f"%{index[value]}"
        if isinstance(value, (list, tuple)):
            return "[" + ",".join(plain(item) for item in value) + "]"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{plain(value[key])}" for key in sorted(value)) + "}"
        return target_name(value) if callable(value) else repr(value)

    def made(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{value.dtype}{tuple(value.shape)}{tuple(value.stride())}{value.device}"
        if isinstance(value, (list, tuple)):
            return ",".join(made(item) for item in value)
        return ""

    digest = hashlib.sha256(f"{torch.__version__}|{num_forward_outputs}|{' '.join(weights)}".encode())
    for node in graph.graph.nodes:
        inputs = f"{plain(node.args)} {plain(node.kwargs)}"
        line = f"{node.op} {target_name(node.target)} {inputs} {made(node.meta.get('val'))}\n"
        digest.update(line.encode())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a graph's input comes from: a kind, a name for the user, and which tensor it is.

    `tensor` is the `id` of the user's own tensor, 0 for what is none. Names are for people: a batch may
    use the name of a parameter.
    """

    kind: Kind
    name: str
    tensor: int = 0


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
class Execution:
    """One execution of a segment. `links[i]` names the earlier output that input i is: (execution, output).

    `from_outside`: some input was made by code between the graphs, and has a gradient to pass on.
    `origins`: where its inputs come from, if not from where they came when the graph was made. `apart`:
    inputs whose gradients leave the graph as terms of a sum; None where the other executions tell.
    """

    segment: Segment
    links: dict[int, tuple[int, int]] = field(default_factory=dict)
    from_outside: bool = False
    origins: list[Origin] | None = None
    apart: frozenset[int] | None = None


@dataclass(slots=True)
class Trace:
    """All graphs of one forward pass in the order they ran.

    `returned` are the (execution, output) that the caller holds; `given` those whose gradient comes from
    outside of the graphs: the loss. `loss_outside`: the loss itself was made outside of them, so that
    nobody can tell which outputs it reads, and all of them may get a gradient. The first `num_in_model`
    are the model's own, the others the loss's. `outside_bytes`: what autograd holds of code between them, by
    how many graphs with a backward pass had run before it, where nobody watched. `outside` is all that such
    code was seen to hold, and `outside_is_counted` that its backward pass could be run, too; then `received`
    are the (execution, output) that got a gradient. `traced` is what torch compiled, where that can run by
    a plan. `sharding` says how the parameters are divided among
    processes, `passages` when they were gathered. `orders` are those of gradients that are not laid out like
    their outputs.
    """

    executions: list[Execution]
    returned: frozenset[tuple[int, int]]
    given: frozenset[tuple[int, int]]
    num_in_model: int
    real_forward: bool = False
    loss_outside: bool = False
    outside_bytes: dict[int, int] = field(default_factory=dict)
    outside: UncapturedCode | None = None
    outside_is_counted: bool = False
    received: frozenset[tuple[int, int]] | None = None
    traced: "TracedModel | None" = None
    sharding: Sharding | None = None
    passages: list[Passage] = field(default_factory=list)
    orders: dict[str, str] = field(default_factory=dict)


def results_of(graph: fx.GraphModule) -> list[fx.Node | None]:
    """What a graph returns, in order; None where it returns nothing or a constant."""
    results = graph.graph.output_node().args[0]
    assert isinstance(results, (list, tuple))
    return [result if isinstance(result, fx.Node) else None for result in results]


def output_storages(segment: Segment) -> list[int]:
    """Which memory each output of a graph is in: the same number for those that share it."""
    values = [node and node.meta.get("val") for node in results_of(segment.joint)]
    return [
        storage_key(value) if isinstance(value, torch.Tensor) else -1 - place
        for place, value in enumerate(values[: segment.num_forward_outputs])
    ]


def has_gradients(joint: fx.GraphModule, num_forward_outputs: int) -> tuple[bool, ...]:
    """For each input of a joint graph, whether it gives a gradient."""
    return tuple(grad is not None for grad in results_of(joint)[num_forward_outputs:])


def mutated_inputs(joint: fx.GraphModule) -> dict[int, int]:
    """Forward outputs that are new values of an input (batch-norm statistics): output to input index."""
    descriptions = joint.graph.output_node().meta.get("desc") or []
    return {
        index: description.mutated_input.idx
        for index, description in enumerate(descriptions)
        if isinstance(description, aot_autograd.InputMutationAOTOutput)
        and isinstance(description.mutated_input, aot_autograd.PlainAOTInput)
    }


def new_segment(
    joint: fx.GraphModule,
    origins: list[Origin],
    *,
    num_forward_outputs: int | None,
    casts_once: bool = False,
) -> Segment:
    """A segment with a graph of its own; None outputs means a graph without backward.

    `casts_once`: autocast casts each weight once for the whole graph.
    """
    new = _copy(joint.graph)
    for node, origin in zip(new.find_nodes(op="placeholder"), origins, strict=False):
        if casts_once and origin.kind is Kind.PARAMETER:
            node.meta[CAST_ONCE] = True
    as_eager_computes(new)
    graph = aot_autograd.graph_module(joint, new)
    weights = [origin.name for origin in origins if origin.kind in (Kind.PARAMETER, Kind.BUFFER)]
    return Segment(
        joint=graph,
        num_forward_outputs=len(results_of(graph)) if num_forward_outputs is None else num_forward_outputs,
        origins=origins,
        differentiable=num_forward_outputs is not None,
        fingerprint=fingerprint(graph, num_forward_outputs, weights),
    )


def copy_of(segment: Segment) -> Segment:
    """The same segment with a graph of its own."""
    return replace(segment, joint=aot_autograd.graph_module(segment.joint, _copy(segment.joint.graph)))


def _copy(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    result = new.graph_copy(graph, {}, return_output_node=True)
    assert isinstance(result, tuple)
    value, output = result
    new.output(value).meta = dict(output.meta)
    return new


def describe_inputs(
    graph: fx.GraphModule,
    origins: Mapping[int, Origin],
    *,
    stranger: Kind,
    identity: Callable[[torch.Tensor], int] = id,
) -> list[Origin]:
    """Where each input of a graph comes from; what `origins` does not know is of the kind `stranger`, and
    known by its `identity`."""
    names = [str(node.target) for node in graph.graph.find_nodes(op="placeholder")]
    return [
        origins.get(id(example)) or Origin(stranger, name, 0 if example is None else identity(example))
        for name, example in zip(names, dynamo.graph_inputs(graph), strict=True)
    ]


def name_tensors(model: nn.Module, batch: Any) -> dict[int, Origin]:
    """What the user calls each tensor that a step reads, by identity."""
    origins: dict[int, Origin] = {}
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, torch.Tensor):
            origins[id(leaf)] = Origin(Kind.INPUT, _path_name(path), id(leaf))
    for name, buffer in model.named_buffers():
        origins[id(buffer)] = Origin(Kind.BUFFER, name, id(buffer))
    for name, parameter in model.named_parameters():
        origins[id(parameter)] = Origin(Kind.PARAMETER, name, id(parameter))
    return origins


def own_origins(model: nn.Module, segment: Segment, args: Sequence[Any]) -> list[Origin]:
    """Where the inputs of this call of a graph come from: several modules can share one graph.

    A parameter that was gathered for the call is the user's own, of which this process has a part.
    """
    known = {storage_key(b): Origin(Kind.BUFFER, name, id(b)) for name, b in model.named_buffers()}
    for name, parameter in model.named_parameters():
        known[storage_key(local(parameter))] = Origin(Kind.PARAMETER, name, id(parameter))
    for name, (whole, own) in gathered(model).items():
        known[storage_key(whole)] = Origin(Kind.PARAMETER, name, id(own))
    origins = list(segment.origins)
    for index, arg in enumerate(args[: len(origins)]):
        if isinstance(arg, torch.Tensor) and storage_key(arg) in known:
            origins[index] = known[storage_key(arg)]
    return origins


def origins_of_run(named: Mapping[int, Origin], segment: Segment, args: Sequence[Any]) -> list[Origin]:
    """Where the inputs of one run of a graph come from, by the storages that have names: layers with equal
    code share a graph, and each has weights of its own."""
    return [
        named.get(storage_key(arg)) or Origin(Kind.OTHER, origin.name, storage_key(arg))
        if isinstance(arg, torch.Tensor)
        else origin
        for arg, origin in zip(args, segment.origins, strict=False)
    ]


def user_tensors(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    """All tensors that a step starts from: parameters, buffers and those in the batch."""
    return [*model.parameters(), *model.buffers(), *tensors_in(batch)]


def _path_name(path: tuple[Any, ...]) -> str:
    """`input_ids` for a keyword argument, `input_0` for a positional one."""
    keys = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path[1:]]
    name = ".".join(keys)
    return f"input_{name}" if name[:1].isdigit() else name


Function = Callable[[list[Any]], Any]


@dataclass(slots=True)
class TracedGraph:
    """A graph that torch has compiled to whatever `forward` is, and the function that `backward` makes when
    its first gradients come.

    `inputs` are fake tensors like those that it takes; `gradients` tells for each whether torch will ask for
    its gradient. `compiled` is what torch has made of it, and is called with its inputs; `key` is None where
    that holds for this one call of the function only.
    """

    segment: Segment
    inputs: Sequence[Any]
    forward: Function
    backward: Callable[[], Function]
    gradients: tuple[bool, ...]
    key: Hashable | None = None
    compiled: Callable[..., Any] = field(init=False)

    def run(self, *inputs: Any) -> Any:
        """What torch calls: a plan changes what that is."""
        return self.compiled(*inputs)


class TracedModel:
    """What torch compiled for a model of one graph: its first step by a plan needs no tracing any more."""

    def __init__(self, model: nn.Module, compiled: Compiled, graph: TracedGraph) -> None:
        self.compiled = compiled
        self.graph = graph
        self._model = weakref.ref(model)
        self._is_taken = False

    def take(self, model: nn.Module) -> bool:
        """Whether this is `model`, and nobody has taken it before: it can run by one plan only."""
        if self._is_taken or self._model() is not model:
            return False
        self._is_taken = True
        return True
