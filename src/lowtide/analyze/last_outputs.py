"""Outputs of the last step that the user's loop keeps live while the next forward pass runs.

for batch in loader:
    output = model(batch)      the name keeps the last output until the call returns
    loss_fn(output).backward()
"""

from dataclasses import replace

from torch import Tensor

from lowtide.analyze.analysis import Analysis, GraphAnalysis
from lowtide.facts import LAST_OUTPUTS, Kind, Region
from lowtide.trace.segments import Trace


def begin_with_last_outputs(
    analysis: Analysis, states: list[GraphAnalysis], trace: Trace, *, at_least_bytes: int = 0
) -> None:
    """Begin the step with the outputs of the last one, where the model returns more than single numbers.

    The last step may have had a larger batch, whose outputs took `at_least_bytes`. `free_last_outputs` finds
    the bytes of equal outputs.
    """
    values = [states[execution].outputs[output] for execution, output in _in_model(trace)]
    results = [node.meta.get("val") for node in values if node is not None]
    found = [value for value in results if isinstance(value, Tensor)]
    # several losses: one number can keep the block of what it was taken over
    if not at_least_bytes and len(found) < 2 and not any(value.dim() for value in found):
        return
    made = analysis.add_storage(nbytes=at_least_bytes, kind=Kind.OTHER, name=LAST_OUTPUTS)
    analysis.last_outputs = analysis.add_node(
        name=LAST_OUTPUTS,
        op="placeholder",
        region=Region.FORWARD,
        holds=(made,),
        makes=(made,),
        fixed="an input of the step",
    )


def free_last_outputs(analysis: Analysis, states: list[GraphAnalysis], trace: Trace) -> None:
    """Let the last outputs be freed where the model's forward pass ends, and a new output takes the name."""
    if analysis.last_outputs is None:
        return
    held = {
        storage
        for execution, output in _in_model(trace)
        if (value := states[execution].outputs[output]) is not None
        for storage in states[execution].holds[value]
    }
    own = [analysis.storages[storage] for storage in sorted(held) if not analysis.storages[storage].static]
    (made,) = analysis.nodes[analysis.last_outputs].makes
    nbytes = max(analysis.storages[made].nbytes, sum(storage.nbytes for storage in own))
    extra_bytes = sum(storage.extra_eager_bytes for storage in own)
    analysis.storages[made] = replace(
        analysis.storages[made], nbytes=nbytes, extra_eager_bytes=max(-nbytes, extra_bytes)
    )
    end = analysis.ends[Region.FORWARD, trace.num_in_model - 1]
    # not at the end itself: a loss whose ops are unknown is live inside of that node, and comes later
    last = next((node for node in reversed(analysis.nodes[:end]) if not node.on_demand), analysis.nodes[end])
    if last.rank != analysis.last_outputs:
        analysis.nodes[last.rank] = replace(last, reads=(analysis.last_outputs, *last.reads))


def _in_model(trace: Trace) -> list[tuple[int, int]]:
    """The returned outputs of the model's own graphs."""
    return [place for place in sorted(trace.returned) if place[0] < trace.num_in_model]
