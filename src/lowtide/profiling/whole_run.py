"""The second way to profile: run the captured graphs whole, for real, and time every node in place."""

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from lowtide.capture.step import Captured
from lowtide.capture.tangents import tangent_outputs
from lowtide.capture.trace import Segment
from lowtide.facts import Step
from lowtide.facts.sizes import format_size
from lowtide.planning.simulate import plain_order, simulate
from lowtide.profiling.costing import Known, measure_costs
from lowtide.profiling.interpreter import GraphProfiler, NodeRun

logger = logging.getLogger("lowtide")


def run_costs(captured: Captured, tensors: Mapping[str, torch.Tensor]) -> tuple[Step, Known]:
    """Times and inner memory of forward and backward from real runs of their graphs.

    `tensors` are the real inputs by name; any other input is made up. What no graph shows (the
    optimizer, recomputed variants of ops) is measured op by op. Needs the memory of the step.
    """
    peak = simulate(captured.step, plain_order(captured.step)).peak_bytes
    logger.warning("running the whole step for real, which takes about %s", format_size(peak))
    step, known = measure_costs(captured)
    runs = [_run(segment, tensors) for segment in captured.segments]
    nodes = list(step.nodes)
    for rank, place in captured.places.items():
        seen = runs[place.run].get(place.node.name)
        if seen is not None:
            recipe = nodes[rank].recipe
            if recipe is not None and rank not in captured.recipe_calls:
                recipe = replace(recipe, seconds=seen.seconds)
            nodes[rank] = replace(
                nodes[rank],
                seconds=seen.seconds,
                workspace_bytes=seen.workspace_bytes,
                recipe=recipe,
                estimated=False,
            )
    return replace(step, nodes=tuple(nodes)), known


def _run(segment: Segment, tensors: Mapping[str, torch.Tensor]) -> dict[str, NodeRun]:
    tangents = tangent_outputs(segment.joint)
    placeholders = segment.joint.graph.find_nodes(op="placeholder")
    primals = [node for node in placeholders if node not in tangents]
    names = [origin.name for origin in segment.origins]
    given = dict(zip(primals, names, strict=False))
    inputs = [_input(node, tensors.get(given.get(node, ""))) for node in placeholders]
    return GraphProfiler(segment.joint, device=inputs[0].device).profile(*inputs, workspace=True)


def _input(node: fx.Node, real: torch.Tensor | None) -> torch.Tensor:
    """A copy of the real tensor, since graphs may write to their inputs; else numbers of its layout."""
    if real is not None:
        return real.detach().clone()
    like = node.meta["val"]
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return made.normal_() if made.is_floating_point() else made.zero_()
