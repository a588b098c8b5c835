"""Which gradients reach the outputs of a joint graph, and with which strides.

A model often returns more than its loss needs (logits beside the loss). AOTAutograd would fill a zero tangent
for the logits; eager PyTorch never makes it. The backward pass is linear in the tangents, so a value that
depends on missing tangents alone is zero, and its op need not run:

    add(mul(tangent_of_loss, a), mul(tangent_of_logits, b))   =>   mul(tangent_of_loss, a)

`specialise` does this for all graphs of a trace. `new_orders` finds tangents whose strides differ from those
of their output, so that the step can be traced for them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lowtide.ops.fake_values import renew_values
from lowtide.ops.gradient_terms import terms
from lowtide.ops.in_place import write_over
from lowtide.ops.random_ops import is_random
from lowtide.ops.schema import readers
from lowtide.torch_compat.aot_autograd import in_another_order, order_of
from lowtide.trace.segments import Execution, Segment, Trace, edited, tangents_of

aten = torch.ops.aten


def drop_zeros(module: fx.GraphModule, *, tangents: set[fx.Node], missing: set[fx.Node]) -> None:
    """Remove from a graph, in place, all nodes that depend only on the tangent inputs `missing`.

    Preserves every other result bit for bit. Gradients that depend only on `missing` become None, as in
    eager. The tangent inputs themselves stay, unused.
    """
    if not missing:
        return
    graph = module.graph
    depends, zero, stale = set(tangents), set(missing), set[fx.Node]()
    for node in list(graph.nodes):
        if node.op == "output":
            results = node.args[0]
            node.args = (type(results)(None if r in zero else r for r in results),)
            continue
        sources = [source for source in node.all_input_nodes if source in depends]
        if not sources:
            continue
        depends.add(node)
        zeros = [source for source in sources if source in zero]
        if len(zeros) == len(sources):
            zero.add(node)
        elif zeros:
            readers = list(node.users)
            left = _without_zeros(graph, node, zeros)
            depends.add(left)
            stale.update(readers if left is not node else [node])
    graph.eliminate_dead_code(is_impure_node=_keeps)
    renew_values(graph, stale)
    module.recompile()


def _keeps(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or node.is_impure() or is_random(node)


def _without_zeros(graph: fx.Graph, node: fx.Node, zeros: list[fx.Node]) -> fx.Node:
    """The node to read in place of `node`: a sum's other term, else `node` with real zeros as inputs."""
    if node.target is terms:
        others = [arg for arg in node.args if isinstance(arg, fx.Node) and arg not in zeros]
        node.args = tuple(others)
        node.meta = {**node.meta, "val": [arg.meta["val"] for arg in others]}
        return node
    other = next((arg for arg in _terms(node) if arg not in zeros), None)
    if isinstance(other, fx.Node) and _same_size(other, node):
        if _is_written_over(node):
            # the term may have later readers: write over a copy
            with graph.inserting_before(node):
                clone = graph.call_function(aten.clone.default, (other,))
            clone.meta = {**node.meta, "val": aten.clone.default(other.meta["val"])}
            other = clone
        node.replace_all_uses_with(other)
        return other
    with graph.inserting_before(node):
        for source in zeros:
            value = source.meta["val"]
            filled = graph.call_function(
                aten.full.default,
                (list(value.shape), 0),
                {"dtype": value.dtype, "device": value.device},
            )
            # a storage of its own: several sources may be views of one value
            filled.meta = {**source.meta, "val": value.new_empty(value.shape)}
            node.replace_input_with(source, filled)
    return node


def _terms(node: fx.Node) -> tuple[Any, ...]:
    """The terms of a sum; empty for any other op."""
    if node.target is aten.add.Tensor and not node.kwargs:
        return node.args
    if node.target is write_over and node.args[0] is aten.add.out and not node.kwargs:
        return node.args[2:]
    return ()


def _is_written_over(node: fx.Node) -> bool:
    """Whether a reader of a value writes over it."""
    return any(reader.target is write_over or "out" in reader.kwargs for reader, _ in readers(node))


def _same_size(one: fx.Node, other: fx.Node) -> bool:
    """Whether one gradient can replace the sum. Its strides may differ from the sum's: eager has no sum
    either, and uses the strides of this gradient, as all that reads it then does."""
    a, b = one.meta.get("val"), other.meta.get("val")
    return (
        isinstance(a, torch.Tensor)
        and isinstance(b, torch.Tensor)
        and (a.shape, a.dtype) == (b.shape, b.dtype)
    )


def specialise(trace: Trace) -> tuple[list[Execution], list[frozenset[int]]]:
    """The captured graphs without missing tangents, and the outputs of the missing tangents.

    A graph that runs several times in one process misses a tangent only if every run misses it.
    """
    absent: dict[str, frozenset[int]] = {}
    while True:
        executions, missing = _specialise(trace, absent)
        found: dict[str, frozenset[int]] = {}
        for execution, without in zip(executions, missing, strict=True):
            name = execution.segment.fingerprint
            found[name] = found.get(name, without) & without
        pairs = zip(executions, missing, strict=True)
        if trace.sharding is not None or all(found[e.segment.fingerprint] == each for e, each in pairs):
            return executions, missing
        absent = found


def _specialise(
    trace: Trace, at_most: Mapping[str, frozenset[int]]
) -> tuple[list[Execution], list[frozenset[int]]]:
    wanted: set[tuple[int, int]] = set(trace.given)
    executions: list[Execution] = []
    missing: list[frozenset[int]] = []
    for index in reversed(range(len(trace.executions))):
        execution = trace.executions[index]
        storages = execution.segment.output_storages
        # a returned view passes its gradient on to the output that it is a view of
        passed = {storages[output] for place, output in wanted if place == index}
        outputs = execution.segment.tangents.values()
        absent = frozenset(output for output in outputs if storages[output] not in passed)
        absent &= at_most.get(execution.segment.fingerprint, absent)
        segment = without_tangents(execution.segment, absent)
        if execution.origins is not None:
            segment = replace(segment, origins=execution.origins)
        grads = segment.gradients
        wanted |= {
            place for primal, place in execution.links.items() if primal < len(grads) and grads[primal]
        }
        if execution.from_uncaptured:
            # uncaptured code that did not run may read any earlier output
            wanted |= {
                (earlier, output)
                for earlier in range(index)
                for output in trace.executions[earlier].segment.tangents.values()
                if trace.received is None or (earlier, output) in trace.received
            }
        executions.append(replace(execution, segment=segment))
        missing.append(absent)
    return executions[::-1], missing[::-1]


def without_tangents(segment: Segment, missing: frozenset[int]) -> Segment:
    """`segment` for a backward pass without gradients of the outputs `missing`; a copy, unless `missing` is
    empty."""
    if not missing:
        return segment

    def drop(joint: fx.GraphModule) -> None:
        tangents = tangents_of(joint)
        drop_zeros(
            joint,
            tangents=set(tangents),
            missing={node for node, output in tangents.items() if output in missing},
        )

    return edited(segment, drop)


def seen_orders(trace: Trace) -> dict[str, set[str]]:
    """By traced memory order, the real orders of the gradients that go from one graph to another."""
    made = {
        (number, output): tangent.meta["val"]
        for number, execution in enumerate(trace.executions[: trace.num_in_model])
        if execution.segment.differentiable
        for tangent, output in execution.segment.tangents.items()
    }
    seen: dict[str, set[str]] = {}
    for execution in trace.executions:
        segment = execution.segment
        grads = segment.gradients if segment.differentiable else []
        for place, source in execution.links.items():
            grad = grads[place] if place < len(grads) else None
            if grad is None or source not in made or made[source].shape != grad.meta["val"].shape:
                continue
            taken, found = made[source], grad.meta["val"]
            is_other = in_another_order(taken.shape, taken.stride(), found.stride())
            order = order_of(found if is_other else taken)
            seen.setdefault(order_of(taken), set()).add(order)
    return seen


def new_orders(trace: Trace) -> dict[str, str]:
    """The orders to trace a step for, where all outputs of one order get gradients in one order."""
    return {
        taken: next(iter(found))
        for taken, found in seen_orders(trace).items()
        if len(found) == 1 and found != {taken}
    }
