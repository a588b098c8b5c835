"""Captured graphs: a `Segment` is a joint graph, a `Trace` all graphs, a `GraphBinding` waits for a plan."""

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from lowtide.facts import Kind
from lowtide.facts.sharding import Passage, Sharding
from lowtide.ops.gradient_terms import CAST_ONCE
from lowtide.ops.passes import as_eager_computes
from lowtide.torch_compat import aot_autograd
from lowtide.torch_compat.dispatch import storage_key
from lowtide.torch_compat.dynamo import Compiled
from lowtide.trace.identity import Origin, fingerprint, structure
from lowtide.trace.uncaptured import UncapturedCode


@dataclass(frozen=True, eq=False)
class Segment:
    """One captured graph: forward and backward in one, from AOTAutograd.

        inputs (primals) ──> forward_ops ──> outputs        results = (*outputs, *gradients)
                                  │ (saved)
        tangents ────────> backward_ops ──> gradients       one tangent per output, one gradient per input

    `differentiable` is False where nothing needs a gradient; the graph is then forward only. The graph of a
    segment never changes: `edited` makes a new segment. So properties of the graph are computed once.
    """

    joint: fx.GraphModule
    num_forward_outputs: int
    origins: list[Origin]
    differentiable: bool
    fingerprint: str

    @cached_property
    def results(self) -> tuple[fx.Node | None, ...]:
        """What the graph returns, in order; None where it returns nothing or a constant."""
        return results_of(self.joint)

    @property
    def outputs(self) -> tuple[fx.Node | None, ...]:
        """The results of the forward pass."""
        return self.results[: self.num_forward_outputs]

    @property
    def gradients(self) -> tuple[fx.Node | None, ...]:
        """The gradient of each input; None for an input that gets none."""
        return self.results[self.num_forward_outputs :]

    @property
    def has_gradients(self) -> tuple[bool, ...]:
        """For each input, whether it gets a gradient."""
        return tuple(gradient is not None for gradient in self.gradients)

    @cached_property
    def tangents(self) -> Mapping[fx.Node, int]:
        """For every tangent input, the index of its output."""
        return tangents_of(self.joint)

    @cached_property
    def primals(self) -> tuple[fx.Node, ...]:
        """The inputs of the forward pass."""
        inputs = self.joint.graph.find_nodes(op="placeholder")
        return tuple(node for node in inputs if node not in self.tangents)

    @property
    def forward_ops(self) -> tuple[fx.Node, ...]:
        """The ops of the forward pass, in the graph's order."""
        return self._split[0]

    @property
    def backward_ops(self) -> tuple[fx.Node, ...]:
        """The ops of the backward pass, in the graph's order."""
        return self._split[1]

    @cached_property
    def mutated_inputs(self) -> Mapping[int, int]:
        """Outputs that are new values of an input (batch-norm statistics): output to input index."""
        return {
            index: description.mutated_input.idx
            for index, description in enumerate(_descriptions(self.joint))
            if isinstance(description, aot_autograd.InputMutationAOTOutput)
            and isinstance(description.mutated_input, aot_autograd.PlainAOTInput)
        }

    @cached_property
    def output_storages(self) -> tuple[int, ...]:
        """The storage of each output: the same number for outputs that share one."""
        values = [node and node.meta.get("val") for node in self.outputs]
        return tuple(
            storage_key(value) if isinstance(value, torch.Tensor) else -1 - place
            for place, value in enumerate(values)
        )

    @cached_property
    def structure(self) -> str:
        """A short hash of the graph's ops and their inputs, independent of shapes."""
        return structure(self.joint)

    @cached_property
    def _split(self) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
        ops = [node for node in self.joint.graph.nodes if node.op not in ("placeholder", "output")]
        if not self.differentiable:
            return tuple(ops), ()
        later: set[fx.Node] = set(self.tangents)
        for node in ops:
            is_tagged = str(node.meta.get("partitioner_tag", "is_forward")) != "is_forward"
            if is_tagged or any(source in later for source in node.all_input_nodes):
                later.add(node)
        return tuple(op for op in ops if op not in later), tuple(op for op in ops if op in later)


@dataclass(slots=True)
class Execution:
    """One execution of a segment. `links[i]` is the earlier (execution, output) that input i comes from.

    `from_uncaptured`: uncaptured code made some input, and reads its gradient. `origins`: the origins of the
    inputs, where they differ from those of the traced graph. `apart`: inputs whose gradients leave the graph
    as terms of a sum; `handed_over`: inputs whose gradients leave as soon as they are made; both None where
    the other executions decide. `in_frames`: each (execution, output) that Python keeps live during this
    execution.
    """

    segment: Segment
    links: dict[int, tuple[int, int]] = field(default_factory=dict)
    from_uncaptured: bool = False
    origins: list[Origin] | None = None
    apart: frozenset[int] | None = None
    handed_over: frozenset[int] | None = None
    in_frames: frozenset[tuple[int, int]] = frozenset()


@dataclass(slots=True)
class Trace:
    """All graphs of one forward pass in the order they ran: `num_in_model` of the model, then those of the
    loss.

    Outputs are named (execution, output):

    - `returned`: outputs that the caller keeps
    - `given`: outputs whose gradient comes from outside of the graphs: the loss. Where the loss itself is
      made by uncaptured code (`loss_is_uncaptured`), any output may get a gradient
    - `received`: outputs that got a gradient when the backward pass of uncaptured code ran; None if it did
      not

    `uncaptured` has what a watch saw of uncaptured code; `uncaptured_is_counted`: the code's backward pass
    ran, too. Without a watch, `uncaptured_bytes` has the bytes that autograd saves, by the number of graphs
    with a backward pass that had run before. `traced` is the compiled model, where it can run by a plan.
    `sharding` says how parameters are sharded over processes, `passages` when they were gathered. `orders`
    are the memory orders of gradients whose strides differ from their output's. `real_forward`: the capture
    ran the forward pass on real values. `has_stand_in_loss`: the loss is not the user's, but the sum of the
    model's outputs. `first_break`: `file:line` of the code that ends the model's first graph.
    """

    executions: list[Execution]
    returned: frozenset[tuple[int, int]]
    given: frozenset[tuple[int, int]]
    num_in_model: int
    real_forward: bool = False
    has_stand_in_loss: bool = False
    loss_is_uncaptured: bool = False
    uncaptured_bytes: dict[int, int] = field(default_factory=dict)
    uncaptured: UncapturedCode | None = None
    uncaptured_is_counted: bool = False
    received: frozenset[tuple[int, int]] | None = None
    traced: "TracedModel | None" = None
    sharding: Sharding | None = None
    passages: list[Passage] = field(default_factory=list)
    orders: dict[str, str] = field(default_factory=dict)
    first_break: str = ""


def results_of(graph: fx.GraphModule) -> tuple[fx.Node | None, ...]:
    """What a graph returns, in order; None where it returns nothing or a constant."""
    results = graph.graph.output_node().args[0]
    assert isinstance(results, (list, tuple))
    return tuple(result if isinstance(result, fx.Node) else None for result in results)


def tangents_of(joint: fx.GraphModule) -> dict[fx.Node, int]:
    """For every tangent input of a joint graph, the index of its output."""
    position = {description: index for index, description in enumerate(_descriptions(joint))}
    return {
        node: position[node.meta["desc"].output]
        for node in joint.graph.find_nodes(op="placeholder")
        if isinstance(node.meta.get("desc"), aot_autograd.TangentAOTInput)
    }


def _descriptions(joint: fx.GraphModule) -> Sequence[Any]:
    """AOTAutograd's description of each result of a joint graph."""
    return joint.graph.output_node().meta.get("desc") or ()


def new_segment(
    joint: fx.GraphModule,
    origins: list[Origin],
    *,
    num_forward_outputs: int | None,
    casts_once: bool = False,
) -> Segment:
    """A segment with its own copy of the graph; `num_forward_outputs=None` for a graph without backward.

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


def edited(segment: Segment, edit: Callable[[fx.GraphModule], None]) -> Segment:
    """The segment with a copy of its graph, changed by `edit`."""
    joint = aot_autograd.graph_module(segment.joint, _copy(segment.joint.graph))
    edit(joint)
    return replace(segment, joint=joint)


def _copy(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    result = new.graph_copy(graph, {}, return_output_node=True)
    assert isinstance(result, tuple)
    value, output = result
    new.output(value).meta = dict(output.meta)
    return new


Function = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class GraphFunctions:
    """The functions of a compiled graph: `forward`, and the function that `backward` makes when the first
    gradients arrive. Both take one list, which they empty."""

    forward: Function
    backward: Callable[[], Function]


class GraphBinding:
    """The slot between a graph that torch compiled at capture and the plan that the graph runs by.

        torch's function ──> GraphBinding ──> during capture: the collector's functions, which compute nothing
                                         └──> from `bind` on: the planned graph of `runtime.backend`

    torch compiles a graph once and keeps the functions of its binding. A graph is bound to one plan, once.
    Nothing may call the graph between capture and `bind`.
    """

    def __init__(self, at_capture: GraphFunctions) -> None:
        self._functions: GraphFunctions | None = at_capture
        self._compiled: Callable[..., Any] | None = None
        self._is_bound = False

    def compiled_to(self, compiled: Callable[..., Any]) -> None:
        """Receive torch's compiled function of the graph, at capture."""
        assert self._compiled is None, "torch compiles a traced graph once"
        self._compiled = compiled

    def end_capture(self) -> None:
        """Drop the collector's functions, which refer to the model and the batch."""
        if not self._is_bound:
            self._functions = None

    def bind(
        self, functions: GraphFunctions, *, around: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Run the graph by `functions` from now on, and torch's compiled function inside of `around`."""
        assert self._compiled is not None, "a graph is bound when torch has compiled it"
        assert not self._is_bound, "a traced graph runs by one plan, and this one has its plan already"
        self._functions, self._compiled, self._is_bound = functions, around(self._compiled), True

    def run(self, *inputs: Any) -> Any:
        """The function that Dynamo calls."""
        assert self._compiled is not None, "a traced graph runs when torch has compiled it"
        return self._compiled(*inputs)

    def forward(self, values: list[Any]) -> Any:
        return self._bound.forward(values)

    def backward(self) -> Function:
        return self._bound.backward()

    @property
    def _bound(self) -> GraphFunctions:
        assert self._functions is not None, "a traced graph is called after its capture, and has no plan"
        return self._functions


@dataclass(frozen=True, slots=True)
class TracedGraph:
    """A graph with a backward pass that torch compiled at capture.

    `inputs` are fake inputs. torch asks for the segment's gradients, and calls `binding`. `key` is None where
    the graph is valid only for this call of the function.
    """

    segment: Segment
    inputs: Sequence[Any]
    key: Hashable | None
    binding: GraphBinding


class TracedModel:
    """The compiled model of one graph: its first step by a plan needs no tracing."""

    def __init__(self, model: nn.Module, compiled: Compiled, graph: TracedGraph) -> None:
        self.compiled = compiled
        self.graph = graph
        self._model = weakref.ref(model)
        self._is_taken = False

    def take(self, model: nn.Module) -> bool:
        """Whether this is `model`, taken for the first time: it can run by one plan only."""
        if self._is_taken or self._model() is not model:
            return False
        self._is_taken = True
        return True
