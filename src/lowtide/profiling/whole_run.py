"""The second way to profile: run the captured graphs whole, for real, and time every node in place."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import fx

from lowtide.capture.graphs import Segment
from lowtide.capture.step import Captured
from lowtide.capture.tangents import tangent_outputs
from lowtide.facts import Run, Step
from lowtide.facts.units import format_size
from lowtide.planning.simulate import eager_runs, walked
from lowtide.profiling.costing import MEMORY_LIMIT_BYTES, Known, measure_costs
from lowtide.profiling.interpreter import GraphProfiler, NodeRun
from lowtide.torchside.one_at_a_time import one_at_a_time

logger = logging.getLogger("lowtide")


@one_at_a_time
def run_costs(
    captured: Captured,
    tensors: Iterable[torch.Tensor],
    *,
    memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
    use_cache: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Step, Known]:
    """Times and inner memory of forward and backward from real runs of their graphs.

    `tensors` are the real inputs; any other input is made up. What no graph shows (the optimizer, and
    methods that run another op) is measured op by op, as `measure_costs` does, which takes the other
    arguments. Needs the memory of the step.
    """
    peak = walked(captured.step, eager_runs(captured.step)).peak_bytes
    logger.warning("running the whole step for real, which takes about %s", format_size(peak))
    step, known = measure_costs(
        captured, memory_limit_bytes=memory_limit_bytes, use_cache=use_cache, progress=progress
    )
    by_identity = {id(tensor): tensor for tensor in tensors}
    runs = [_run(segment, by_identity) for segment in captured.segments]
    nodes = list(step.nodes)
    for rank, place in captured.places.items():
        seen = runs[place.execution].get(place.node.name)
        if seen is not None:
            recipes = [
                recipe
                if Run(rank, recipe.method) in captured.calls
                else replace(recipe, seconds=seen.seconds)
                for recipe in nodes[rank].recipes
            ]
            nodes[rank] = replace(
                nodes[rank],
                seconds=seen.seconds,
                # less than none, where the plan's graphs write over what these do not
                workspace_bytes=seen.workspace_bytes + captured.step.nodes[rank].workspace_bytes,
                recipes=tuple(recipes),
                estimated=False,
            )
    return replace(step, nodes=tuple(nodes)), known


def _run(segment: Segment, tensors: Mapping[int, torch.Tensor]) -> dict[str, NodeRun]:
    tangents = tangent_outputs(segment.joint)
    placeholders = segment.joint.graph.find_nodes(op="placeholder")
    primals = [node for node in placeholders if node not in tangents]
    identities = [origin.tensor for origin in segment.origins]
    given = dict(zip(primals, identities, strict=False))
    inputs = [_input(node, tensors.get(given.get(node, 0))) for node in placeholders]
    return GraphProfiler(segment.joint, device=inputs[0].device).profile(*inputs, workspace=True)


def _input(node: fx.Node, real: torch.Tensor | None) -> torch.Tensor:
    """A copy of the real tensor, since graphs may write to their inputs; else numbers of its layout."""
    if real is not None:
        return real.detach().clone()
    like = node.meta["val"]
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return made.normal_() if made.is_floating_point() else made.zero_()
