"""Turn a joint graph and a schedule into the forward and the backward graph that run.

    joint      x ─ a ─ b ─ c ─ loss        c' reads b, b' reads a, a' reads x
    schedule   c', recompute a, b', a'     (b is kept, a is not)

    forward    x ─ a ─ b ─ c               returns the outputs, and saves b and x
    backward   b, x ─ c' ─ a again ─ b' ─ a'

The joint graph does not change. The forward graph runs every forward op once, in the order of capture. The
backward graph runs the schedule: backward ops, and copies of forward ops, each of which reads the latest copy
of its inputs. The forward graph saves only values that backward reads. The write of an offloaded value begins
right after its op; its first reader in backward waits for the prefetch.
"""

import operator
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowtide.analyze.backward_facts import overwrites
from lowtide.analyze.optimizer_facts import updatable_inputs, update_places
from lowtide.facts import GraphRun
from lowtide.offload.fetched_weight import finish_fetch, start_fetch
from lowtide.ops.calls import Call
from lowtide.optim.step_in_backward import StepInBackward, update_parameter
from lowtide.remat import Kept, rule_named
from lowtide.runtime.fetches import fetched_storages
from lowtide.torch_compat import aot_autograd
from lowtide.torch_compat.dispatch import is_number, map_leaves, storage_key
from lowtide.trace.segments import Segment

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The two graphs that run; `num_saved` values pass from the first to the second, and keep `saved_bytes`
    live besides the tensors of the model and of the batch. The last `num_numbers` of them are
    Python's, and autograd does not check the version of the `num_unchecked` before those.

    Backward's inputs are the saved numbers, the saved tensors, then one gradient for each of `tangents`, the
    outputs that can have one.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_saved: int
    saved_bytes: int
    tangents: tuple[int, ...]
    num_unchecked: int
    num_numbers: int


@dataclass(frozen=True, slots=True)
class _Step:
    """One run of a schedule: a backward op, or a `call` that rematerializes a forward value. A backward op
    has a `call` where a remat rule runs it."""

    node: fx.Node
    rule: str = ""
    call: Call | None = None


@dataclass(frozen=True, slots=True)
class _Saved:
    """The values that pass from the forward to the backward graph: forward values, and values of remat
    rules."""

    values: list[fx.Node]
    kept: dict[Kept, str]
    """with a name for each"""

    @property
    def checked(self) -> list[fx.Node | Kept]:
        """The values whose version autograd checks; they are first."""
        tensors = (node for node in self.values if not _is_number(node))
        return [*(node for node in tensors if not _no_version_check(node)), *self.kept]

    @property
    def unchecked(self) -> list[fx.Node | Kept]:
        return [node for node in self.values if _no_version_check(node)]

    @property
    def numbers(self) -> list[fx.Node | Kept]:
        return [node for node in self.values if _is_number(node)]

    @property
    def as_returned(self) -> list[fx.Node | Kept]:
        """In the order of the forward graph's outputs."""
        return [*self.checked, *self.unchecked, *self.numbers]

    @property
    def as_given(self) -> list[fx.Node | Kept]:
        """In the order of the backward graph's inputs."""
        return [*self.numbers, *self.checked, *self.unchecked]


NO_FETCHES: Mapping[int, int] = {}

Keepers = dict[fx.Node, list[Kept]]
"""The values that remat rules keep, by the forward node that they rematerialize."""


def baseline_schedule(segment: Segment) -> tuple[GraphRun, ...]:
    """The schedule that rematerializes nothing."""
    forward, backward = segment.forward_ops, segment.backward_ops
    return tuple(GraphRun(position) for position in range(len(forward), len(forward) + len(backward)))


def rewrite(
    segment: Segment,
    schedule: Sequence[GraphRun],
    *,
    releases: Sequence[tuple[int, int]] = (),
    updates: StepInBackward | None = None,
    store: int = 0,
    in_place: bool = True,
    begins: Mapping[int, int] = NO_FETCHES,
) -> Rewritten:
    """The forward and backward graphs of `segment` under `schedule` and `releases` (see `facts.Graph`).

    `updates` steps parameters in the backward pass; their gradients are not returned. `store`: the number of
    the offload store. `in_place`: ops may overwrite an input at its last read. `begins`: see
    `fetches.WithFetches`.
    """
    forward_ops, backward_ops = segment.forward_ops, segment.backward_ops
    tangents = segment.tangents
    steps, keepers = _look_up(schedule, forward_ops, backward_ops)
    saved = _saved(segment, steps, keepers, tangents)
    return Rewritten(
        forward=_forward_graph(
            segment,
            forward_ops,
            keepers,
            saved,
            tangents,
            releases=dict(releases),
            begins=begins,
            store=store,
        ),
        backward=_backward_graph(segment, steps, saved, tangents, updates=updates, in_place=in_place),
        num_saved=len(saved.as_given),
        saved_bytes=_bytes_of(saved, segment),
        tangents=tuple(tangents.values()),
        num_unchecked=len(saved.unchecked),
        num_numbers=len(saved.numbers),
    )


def _look_up(
    schedule: Sequence[GraphRun], forward_ops: Sequence[fx.Node], backward_ops: Sequence[fx.Node]
) -> tuple[list[_Step], Keepers]:
    ops = [*forward_ops, *backward_ops]
    keepers: dict[tuple[fx.Node, str], tuple[Kept, ...]] = {}
    steps = []
    for position, name in schedule:
        node = ops[position]
        if not name:
            steps.append(_Step(node))
            continue
        rule = rule_named(name)
        if (node, name) not in keepers:
            keepers[node, name] = rule.kept(node)
        steps.append(_Step(node, name, rule.call(node, keepers[node, name])))
    by_node: Keepers = {}
    for (node, _), kept in keepers.items():
        by_node.setdefault(node, []).extend(kept)
    return steps, by_node


def forward_only(segment: Segment) -> fx.GraphModule:
    """A copy of a graph without a backward part."""
    graph = fx.Graph()
    new: dict[fx.Node | Kept, fx.Node] = {}
    for node in segment.joint.graph.nodes:
        new[node] = _copy(graph, node, new)
    return _module(segment, graph)


def _saved(segment: Segment, steps: list[_Step], keepers: Keepers, tangents: Container[fx.Node]) -> _Saved:
    """Forward values that backward reads from their first run, and all values that remat rules keep."""
    made: set[fx.Node] = set()
    saved: dict[fx.Node, None] = {}

    def read(source: fx.Node) -> None:
        if source not in made and source not in tangents:
            saved[source] = None

    for step in steps:
        if _unpacks(step, made):
            saved[step.node] = None
            continue
        if step.call is None:
            for source in step.node.all_input_nodes:
                read(source)
        else:
            fx.node.map_arg((step.call.args, step.call.kwargs), read)
        made.add(step.node)
    for grad in segment.gradients:
        if grad is not None:
            read(grad)
    position = {node: index for index, node in enumerate(segment.joint.graph.nodes)}
    kept = {
        k: f"{node.name}_{k.name}"
        for node in sorted(keepers, key=position.__getitem__)
        for k in keepers[node]
    }
    return _Saved(sorted(saved, key=position.__getitem__), kept)


def _bytes_of(saved: _Saved, segment: Segment) -> int:
    inputs = segment.joint.graph.find_nodes(op="placeholder")
    known = {storage_key(node.meta["val"]) for node in inputs if isinstance(node.meta["val"], torch.Tensor)}
    known -= fetched_storages(segment, saved.values)
    values = [kept.value for kept in saved.kept] + [node.meta.get("val") for node in saved.values]
    sizes = {storage_key(v): v.untyped_storage().nbytes() for v in values if isinstance(v, torch.Tensor)}
    return sum(nbytes for key, nbytes in sizes.items() if key not in known)


def _unpacks(step: _Step, made: Container[Any]) -> bool:
    """Whether a step only takes a part of a forward tuple: the first run has the same value."""
    call = step.call
    return call is not None and call.target is operator.getitem and call.args[0] not in made


def _no_version_check(node: fx.Node) -> bool:
    return bool(node.meta.get("saved_tensor_with_no_vc_check", False))


def _is_number(node: fx.Node) -> bool:
    return is_number(node.meta.get("val"))


def _forward_graph(
    segment: Segment,
    ops: Sequence[fx.Node],
    keepers: Keepers,
    saved: _Saved,
    tangents: Container[fx.Node],
    *,
    releases: Mapping[int, int],
    begins: Mapping[int, int],
    store: int,
) -> fx.GraphModule:
    graph = fx.Graph()
    new: dict[fx.Node | Kept, fx.Node] = {}
    to_begin: dict[int, list[fx.Node]] = {}
    for number, place in begins.items():
        to_begin.setdefault(min(place, number), []).append(ops[number])
    for primal in segment.joint.graph.find_nodes(op="placeholder"):
        if primal not in tangents:
            new[primal] = graph.node_copy(primal)

    to_release: dict[int, list[tuple[fx.Node, Kept, fx.Node]]] = {}

    def keep(node: fx.Node, kept: Kept, begun: fx.Node | None = None) -> None:
        new[kept] = _write(graph, kept.call, new if begun is None else {**new, node: begun})
        new[kept].meta = {**node.meta, "val": kept.value, "lowtide_kept": kept.name}

    begun_fetches: dict[fx.Node, fx.Node] = {}
    for position, node in enumerate(ops):
        for fetch in to_begin.get(position, ()):
            (weight,) = fetch.all_input_nodes
            begun_fetches[fetch] = graph.call_function(start_fetch, (new[weight],))
        if node in begun_fetches:
            new[node] = graph.call_function(finish_fetch, (begun_fetches[node],))
            new[node].meta = dict(node.meta)
            continue
        mine = keepers.get(node, ())
        for kept in mine:
            if kept.before:
                keep(node, kept)
        new[node] = _copy(graph, node, new)
        for kept in mine:
            if kept.begin is not None:
                begun = graph.call_function(kept.begin, (store, new[node]))
                to_release.setdefault(releases.get(position, position), []).append((node, kept, begun))
            elif not kept.before:
                keep(node, kept)
        for released in to_release.pop(position, ()):
            keep(*released)
    assert not to_release, "a value leaves after an op that is not there"
    results = segment.outputs
    given = segment.joint.graph.output_node().args[0]
    assert isinstance(given, (list, tuple))
    outputs: list[Any] = [
        new[node] if node is not None else value for node, value in zip(results, given, strict=False)
    ]
    graph.output([*outputs, *(new[value] for value in saved.as_returned)])
    return _module(segment, graph)


def _backward_graph(
    segment: Segment,
    steps: list[_Step],
    saved: _Saved,
    tangents: Mapping[fx.Node, int],
    *,
    updates: StepInBackward | None,
    in_place: bool,
) -> fx.GraphModule:
    graph = fx.Graph()
    latest: dict[fx.Node | Kept, fx.Node] = {}
    backward_ops = set(segment.backward_ops)
    ran = [step.node for step in steps if step.node in backward_ops]
    calls = {step.node: step.call for step in steps if step.call and step.node in backward_ops}
    written_over = overwrites(segment, ran, calls) if in_place else {}
    for value in (*saved.as_given, *tangents):
        latest[value] = graph.placeholder(saved.kept[value] if isinstance(value, Kept) else value.name)
        latest[value].meta = {"val": value.value} if isinstance(value, Kept) else dict(value.meta)
    updated_grads = {} if updates is None else updatable_inputs(segment, updates.place)
    places = update_places(segment, [(step.node, _reads(step)) for step in steps], updated_grads)
    results: dict[int, fx.Node] = {}
    coming: dict[fx.Node, Any] = {}

    def wait_for(values: Iterable[fx.Node | None]) -> None:
        for value in values:
            if value is not None and value in coming:
                there = graph.call_function(coming.pop(value), (latest[value],))
                there.meta, latest[value] = latest[value].meta, there

    for place, step in enumerate(steps):
        if not _unpacks(step, latest):
            wait_for(_reads(step))
            latest[step.node] = _written(graph, step, latest, written_over)
            coming.pop(step.node, None)
            if step.rule and (wait := rule_named(step.rule).wait) is not None:
                coming[step.node] = wait
        for index in places.get(place, ()):
            assert updates is not None
            number = updates.place[segment.origins[index].tensor]
            arguments = (updates.number, number, latest[updated_grads[index]])
            results[index] = graph.call_function(update_parameter, arguments)
    grads = segment.gradients
    wait_for(grads)
    graph.output(
        [None if grad is None else results.get(index) or latest[grad] for index, grad in enumerate(grads)]
    )
    return _module(segment, graph)


def _written(
    graph: fx.Graph,
    step: _Step,
    latest: Mapping[fx.Node | Kept, fx.Node],
    written_over: Mapping[fx.Node, Call],
) -> fx.Node:
    """One step of a schedule as a node of the backward graph."""
    if step.node in written_over:
        copy = _write(graph, written_over[step.node], latest)
        copy.meta = dict(step.node.meta)
        return copy
    if step.call is None:
        return _copy(graph, step.node, latest)
    copy = _write(graph, step.call, latest)
    copy.meta = {
        **step.node.meta,
        "lowtide_rule": step.rule,
        "lowtide_recompute": step.node.name,
        "partitioner_tag": "is_backward",
    }
    return copy


def _reads(step: _Step) -> list[fx.Node]:
    if step.call is None:
        return list(step.node.all_input_nodes)
    found: list[fx.Node] = []
    fx.node.map_arg((step.call.args, step.call.kwargs), found.append)
    return found


def _copy(graph: fx.Graph, node: fx.Node, new: Mapping[fx.Node | Kept, fx.Node]) -> fx.Node:
    copy = graph.node_copy(node, lambda source: new[source])
    copy.target = _possible(copy.target)
    return copy


def _write(graph: fx.Graph, call: Call, new: Mapping[fx.Node | Kept, fx.Node]) -> fx.Node:
    """A call as a node of `graph`; the nodes and kept tensors among its arguments are those of `new`."""
    args, kwargs = fx.node.map_arg((call.args, call.kwargs), lambda source: new[source])
    args, kwargs = map_leaves(lambda leaf: new[leaf] if isinstance(leaf, Kept) else leaf, (args, kwargs))
    return graph.call_function(_possible(call.target), tuple(args), dict(kwargs))


def _possible(target: Any) -> Any:
    """A reshape for a view: real strides can differ from fake ones and make the view impossible."""
    return aten.reshape.default if target is aten.view.default else target


def _module(segment: Segment, graph: fx.Graph) -> fx.GraphModule:
    graph.lint()
    return aot_autograd.graph_module(segment.joint, graph)
