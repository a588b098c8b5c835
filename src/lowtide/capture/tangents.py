"""Specialise a joint graph to the outputs that get a gradient.

A model often returns more than its loss needs (logits beside the loss). AOTAutograd would fill a
zero gradient for each; eager PyTorch never makes it. The backward pass is linear in those
gradients, so whatever depends on missing ones alone is zero and need not run.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from lowtide.torchside import hooks
from lowtide.torchside.ops.in_place import write_over
from lowtide.torchside.ops.random import is_random
from lowtide.torchside.ops.readers import readers
from lowtide.torchside.ops.terms import terms

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
        if isinstance(node.meta.get("desc"), hooks.TangentAOTInput)
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
