"""Which nodes of a joint graph run forward and which backward, for the gradients that are asked for."""

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from lowtide.capture.graphs import Execution, Segment, Trace, copy_of, output_storages, results_of
from lowtide.capture.tangents import drop_missing, tangent_outputs


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
