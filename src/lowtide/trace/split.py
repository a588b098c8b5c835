"""Specialise a joint graph to the outputs that get a gradient.

A model often returns more than its loss needs (logits beside the loss). AOTAutograd would fill a
zero gradient for each; eager PyTorch never makes it. The backward pass is linear in those
gradients, so whatever depends on missing ones alone is zero and need not run.

Which nodes of a joint graph run forward and which backward, for the gradients that are asked for.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lowtide.ops.gradient_terms import terms
from lowtide.ops.in_place import write_over
from lowtide.ops.random_ops import is_random
from lowtide.ops.schema import readers
from lowtide.torch_compat import aot_autograd
from lowtide.trace.segments import Execution, Segment, Trace, copy_of, output_storages, results_of

aten = torch.ops.aten

STANDS_FOR = "lowtide_stands_for"


def stands_for(node: fx.Node) -> tuple[torch.Tensor, ...]:
    """Fake values of removed nodes whose place a node has taken."""
    values: tuple[torch.Tensor, ...] = node.meta.get(STANDS_FOR, ())
    return values


def tangent_outputs(joint: fx.GraphModule) -> dict[fx.Node, int]:
    """For every tangent input of a joint graph, the index of the output it is the gradient of."""
    descriptions = joint.graph.output_node().meta.get("desc") or []
    position = {description: index for index, description in enumerate(descriptions)}
    return {
        node: position[node.meta["desc"].output]
        for node in joint.graph.find_nodes(op="placeholder")
        if isinstance(node.meta.get("desc"), aot_autograd.TangentAOTInput)
    }


def drop_missing(joint: fx.GraphModule, *, missing: Collection[int]) -> None:
    """Remove from `joint`, in place, what depends only on the gradients of the outputs `missing`.

    Preserves every other result bit for bit; gradients that depend on nothing else become None, as
    in eager. The tangent inputs themselves stay, unused.
    """
    outputs = tangent_outputs(joint)
    drop_zeros(
        joint,
        tangents=set(outputs),
        missing={node for node, output in outputs.items() if output in missing},
    )


def drop_zeros(module: fx.GraphModule, *, tangents: set[fx.Node], missing: set[fx.Node]) -> None:
    """The same for any graph, given its tangent inputs and which of them are missing."""
    if not missing:
        return
    graph = module.graph
    depends, zero = set(tangents), set(missing)
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
            depends.add(_without_zeros(graph, node, zeros))
    graph.eliminate_dead_code(is_impure_node=_keeps)
    module.recompile()


def _keeps(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or node.is_impure() or is_random(node)


def _without_zeros(graph: fx.Graph, node: fx.Node, zeros: list[fx.Node]) -> fx.Node:
    """What is read instead of `node` from now on: it itself, with real zeros, unless it is a sum."""
    if node.target is terms:
        others = [arg for arg in node.args if isinstance(arg, fx.Node) and arg not in zeros]
        node.args = tuple(others)
        node.meta = {**node.meta, "val": [arg.meta["val"] for arg in others]}
        return node
    other = next((arg for arg in _terms(node) if arg not in zeros), None)
    if isinstance(other, fx.Node) and _same_size(other, node):
        if _is_written_over(node):
            # what was not to be written over may be read later
            with graph.inserting_before(node):
                other = graph.call_function(aten.clone.default, (other,))
            other.meta = dict(node.meta)
        else:
            # views of the sum are views of this now, though their fake values do not show it
            other.meta[STANDS_FOR] = (*stands_for(other), node.meta["val"], *stands_for(node))
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
            filled.meta = dict(source.meta)
            node.replace_input_with(source, filled)
    return node


def _terms(node: fx.Node) -> tuple[Any, ...]:
    """What a sum adds up; nothing for any other op."""
    if node.target is aten.add.Tensor and not node.kwargs:
        return node.args
    if node.target is write_over and node.args[0] is aten.add.out and not node.kwargs:
        return node.args[2:]
    return ()


def _is_written_over(node: fx.Node) -> bool:
    """Whether something that reads a value writes over what it reads."""
    return any(reader.target is write_over or "out" in reader.kwargs for reader, _ in readers(node))


def _same_size(one: fx.Node, other: fx.Node) -> bool:
    """Whether one gradient can stand where the sum was. Its strides may be others: they are those that it has
    in eager, where there is no sum, and later sums are rounded in their order."""
    a, b = one.meta.get("val"), other.meta.get("val")
    return (
        isinstance(a, torch.Tensor)
        and isinstance(b, torch.Tensor)
        and (a.shape, a.dtype) == (b.shape, b.dtype)
    )


def specialise(trace: Trace) -> tuple[list[Execution], list[frozenset[int]]]:
    """The captured graphs without the gradients that nobody asks for, and which outputs those are of.

    A graph that runs several times in one process has the same ones each time: those that no run asks for.
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
        storages = output_storages(execution.segment)
        # a view that the caller holds passes its gradient on to whichever output it is a view of
        passed = {storages[output] for place, output in wanted if place == index}
        outputs = tangent_outputs(execution.segment.joint).values()
        absent = frozenset(output for output in outputs if storages[output] not in passed)
        absent &= at_most.get(execution.segment.fingerprint, absent)
        segment = without_tangents(execution.segment, absent)
        if execution.origins is not None:
            segment = replace(segment, origins=execution.origins)
        grads = results_of(segment.joint)[segment.num_forward_outputs :]
        wanted |= {
            place for primal, place in execution.links.items() if primal < len(grads) and grads[primal]
        }
        if execution.from_outside:
            # unless it was run, nobody can tell which of the earlier outputs that code read
            wanted |= {
                (earlier, output)
                for earlier in range(index)
                for output in tangent_outputs(trace.executions[earlier].segment.joint).values()
                if trace.received is None or (earlier, output) in trace.received
            }
        executions.append(replace(execution, segment=segment))
        missing.append(absent)
    return executions[::-1], missing[::-1]


def without_tangents(segment: Segment, missing: frozenset[int]) -> Segment:
    """`segment` with a backward part that assumes no gradient for the outputs `missing`: a copy, where
    there are any."""
    if not missing:
        return segment
    copy = copy_of(segment)
    drop_missing(copy.joint, missing=missing)
    return copy


def is_forward(node: fx.Node, after: set[fx.Node]) -> bool:
    """Whether a joint graph's node runs in the forward pass; `after` are those known to run later."""
    if node in after or any(source in after for source in node.all_input_nodes):
        return False
    return str(node.meta.get("partitioner_tag", "is_forward")) == "is_forward"


def split(segment: Segment) -> tuple[list[fx.Node], list[fx.Node]]:
    """Forward and backward ops of a joint graph, in its order, inputs and output left out."""
    after: set[fx.Node] = set(tangent_outputs(segment.joint))
    forward: list[fx.Node] = []
    backward: list[fx.Node] = []
    for node in segment.joint.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if not segment.differentiable or is_forward(node, after):
            forward.append(node)
        else:
            after.add(node)
            backward.append(node)
    return forward, backward
