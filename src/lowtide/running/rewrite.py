"""Turn a joint graph and a schedule into the forward and the backward graph that run.

`graph -> graphs`: the joint graph is not touched. The forward graph runs every forward op once, in
the order it was captured. The backward graph runs what the schedule says: backward ops, and before
them copies of forward ops, each reading the latest earlier copy of what it needs. Values that
backward still reads from the forward pass are saved; nothing else is.
"""

import operator
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowtide.capture import recipes
from lowtide.capture.names import device_name
from lowtide.capture.regions import split
from lowtide.capture.tangents import tangent_outputs
from lowtide.capture.trace import Segment, results_of
from lowtide.facts import How
from lowtide.torchside.hooks import OpOverload, boxed

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The two graphs that run; `num_saved` tensors pass from the first to the second.

    Backward's inputs are the saved tensors, then one gradient for each of `tangents`, the outputs
    that can have one.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_saved: int
    tangents: tuple[int, ...]


def plain_schedule(segment: Segment) -> tuple[int, ...]:
    """The schedule that recomputes nothing."""
    forward, backward = split(segment)
    return tuple(range(len(forward), len(forward) + len(backward)))


def rewrite(segment: Segment, schedule: Sequence[int]) -> Rewritten:
    """The forward and backward graphs of `segment` under `schedule` (see `facts.Graph`)."""
    forward_ops, backward_ops = split(segment)
    ops = [*forward_ops, *backward_ops]
    first_backward = len(forward_ops)
    tangents = tangent_outputs(segment.joint)
    primals = [n for n in segment.joint.graph.find_nodes(op="placeholder") if n not in tangents]

    replayed = _replayed(ops, schedule, first_backward)
    saved, states = _saved_values(
        [ops[index] for index in schedule], forward_ops, tangents, segment, replayed
    )
    forward = _forward_graph(segment, primals, forward_ops, saved, states)
    backward = _backward_graph(segment, schedule, saved=saved, states=states, tangents=tangents)
    return Rewritten(
        forward=forward,
        backward=backward,
        num_saved=len(saved) + len(states),
        tangents=tuple(tangents.values()),
    )


def forward_only(segment: Segment) -> fx.GraphModule:
    """A graph without a backward part, as it is run."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in segment.joint.graph.nodes:
        new[node] = _copy(graph, node, new)
    return _module(segment, graph)


def _replayed(ops: list[fx.Node], schedule: Sequence[int], first_backward: int) -> list[fx.Node]:
    """Random ops that the schedule runs again, in forward order."""
    indices = {index for index in schedule if index < first_backward}
    return [ops[i] for i in sorted(indices) if recipes.how_again(ops[i]) is How.REPLAY]


def _again_inputs(node: fx.Node) -> list[fx.Node]:
    """What a copy of `node` reads."""
    how = recipes.how_again(node)
    if how is How.MASK:
        pair = recipes.dropout_output(node)
        assert pair is not None
        return list(pair)
    if how is How.NO_STATS:
        return [arg for arg in recipes.without_statistics(node)[1] if isinstance(arg, fx.Node)]
    return node.all_input_nodes


def _saved_values(
    runs: list[fx.Node],
    forward_ops: list[fx.Node],
    tangents: dict[fx.Node, int],
    segment: Segment,
    replayed: list[fx.Node],
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Forward values that a backward run reads from the first run, and ops whose random state is kept."""
    in_forward = set(forward_ops)
    made: set[fx.Node] = set(tangents)
    saved: dict[fx.Node, None] = {}
    for node in runs:
        again = node in in_forward
        if again and _unpacks(node, made):
            saved[node] = None
            continue
        for source in _again_inputs(node) if again else node.all_input_nodes:
            if source not in made:
                saved[source] = None
        made.add(node)
    for grad in results_of(segment.joint)[segment.num_forward_outputs :]:
        if grad is not None and grad not in made:
            saved[grad] = None
    position = {node: index for index, node in enumerate(segment.joint.graph.nodes)}
    ordered = sorted(saved, key=lambda node: (_no_version_check(node), position[node]))
    return ordered, replayed


def _unpacks(node: fx.Node, made: Container[fx.Node]) -> bool:
    """Whether a copy of `node` would only unpack the forward pass's tuple: its first run is that value."""
    return node.target is operator.getitem and node.args[0] not in made and not recipes.dropout_output(node)


def _no_version_check(node: fx.Node) -> bool:
    return bool(node.meta.get("saved_tensor_with_no_vc_check", False))


def _forward_graph(
    segment: Segment,
    primals: list[fx.Node],
    ops: list[fx.Node],
    saved: list[fx.Node],
    states: list[fx.Node],
) -> fx.GraphModule:
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    captured: dict[fx.Node, fx.Node] = {}
    for primal in primals:
        new[primal] = graph.node_copy(primal)
    for node in ops:
        if node in states:
            captured[node] = graph.call_function(recipes.random_state, (device_name(node),))
            captured[node].meta = {**node.meta, "val": _state_value(node)}
        new[node] = _copy(graph, node, new)
    results = results_of(segment.joint)[: segment.num_forward_outputs]
    plain = segment.joint.graph.output_node().args[0]
    assert isinstance(plain, (list, tuple))
    outputs: list[Any] = [
        new[node] if node is not None else value for node, value in zip(results, plain, strict=False)
    ]
    checked = [new[node] for node in saved if not _no_version_check(node)]
    unchecked = [new[node] for node in saved if _no_version_check(node)]
    graph.output([*outputs, *checked, *(captured[node] for node in states), *unchecked])
    return _module(segment, graph)


def _backward_graph(
    segment: Segment,
    schedule: Sequence[int],
    *,
    saved: list[fx.Node],
    states: list[fx.Node],
    tangents: dict[fx.Node, int],
) -> fx.GraphModule:
    forward_ops, backward_ops = split(segment)
    ops, first_backward = [*forward_ops, *backward_ops], len(forward_ops)
    graph = fx.Graph()
    latest: dict[fx.Node, fx.Node] = {}
    state: dict[fx.Node, fx.Node] = {}

    def receive(nodes: list[fx.Node]) -> None:
        for node in nodes:
            latest[node] = graph.placeholder(node.name)
            latest[node].meta = dict(node.meta)

    receive([node for node in saved if not _no_version_check(node)])
    for node in states:
        state[node] = graph.placeholder(f"{node.name}_random_state")
        state[node].meta = {**node.meta, "val": _state_value(node)}
    receive([node for node in saved if _no_version_check(node)])
    receive(list(tangents))
    for index in schedule:
        node = ops[index]
        if index < first_backward and _unpacks(node, latest):
            continue
        if index < first_backward:
            latest[node] = _copy_again(graph, node, latest, state)
        else:
            latest[node] = _copy(graph, node, latest)
    grads = results_of(segment.joint)[segment.num_forward_outputs :]
    graph.output([None if grad is None else latest[grad] for grad in grads])
    return _module(segment, graph)


def _copy(graph: fx.Graph, node: fx.Node, new: dict[fx.Node, fx.Node]) -> fx.Node:
    copy = graph.node_copy(node, lambda source: new[source])
    if copy.target is aten.view.default:
        # fake strides can differ from real ones: where a view is impossible at run time, copy
        copy.target = aten.reshape.default
    return copy


def _copy_again(
    graph: fx.Graph, node: fx.Node, latest: dict[fx.Node, fx.Node], state: dict[fx.Node, fx.Node]
) -> fx.Node:
    """A copy of a forward op for the backward graph, by its recipe, marked as recompute."""
    how = recipes.how_again(node)
    if how is How.MASK:
        value, mask = (latest[source] for source in _again_inputs(node))
        dropout = node.args[0]
        assert isinstance(dropout, fx.Node)
        copy = graph.call_function(recipes.apply_mask, (value, mask, dropout.args[1]))
    elif how is How.NO_STATS:
        target, args = recipes.without_statistics(node)
        copy = graph.call_function(target, fx.node.map_arg(args, lambda source: latest[source]))
    elif how is How.REPLAY:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: latest[source])
        first = (state[node], device_name(node))
        if node.target is recipes.eager_dropout:
            copy = graph.call_function(recipes.replay_dropout, (*first, *args))
        else:
            copy = graph.call_function(recipes.replay, (*first, _op(node), *args), dict(kwargs))
    else:
        copy = _copy(graph, node, latest)
    copy.meta = {**node.meta, "lowtide_recompute": node.name, "partitioner_tag": "is_backward"}
    return copy


def _op(node: fx.Node) -> OpOverload[..., Any]:
    assert isinstance(node.target, OpOverload)
    return node.target


def _state_value(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    tensor = value[0] if isinstance(value, (list, tuple)) else value
    with tensor.fake_mode:
        return torch.empty(recipes.random_state_bytes(device_name(node)), dtype=torch.uint8)


def _module(segment: Segment, graph: fx.Graph) -> fx.GraphModule:
    graph.lint()
    module = fx.GraphModule(segment.joint, boxed(graph))
    module.recompile()
    return module
