"""The one lever that rounds: captured graphs whose heads run in chunks of rows, where the user allows it.

A graph keeps its fingerprint: what a plan says of the graph decides in which form it runs.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import fx

from lowtide.ops.rounded_head import use_rounded_head
from lowtide.trace.segments import Execution, Segment, Trace, edited

HEAD = "head"


def rounded(segment: Segment, *, returned: Collection[int]) -> tuple[Segment, bool, list[str]]:
    """The segment with its heads in chunks, of whose outputs the loop may read those `returned`; whether that
    changed any; and why others stay as they are."""
    changed, refused = False, list[str]()
    if not segment.differentiable:
        return segment, False, []

    def edit(joint: fx.GraphModule) -> None:
        nonlocal changed
        changed, refused[:] = use_rounded_head(
            joint.graph, num_outputs=segment.num_forward_outputs, returned=returned
        )

    new = edited(segment, edit)
    return (new if changed else segment), changed, refused


def with_rounding(
    trace: Trace, executions: Sequence[Execution], rounds: Collection[str]
) -> tuple[list[Execution], list[tuple[str, ...]], list[str]]:
    """The executions of a trace, rounded where `rounds` allows it; what rounds in each; and why others do
    not."""
    used: list[tuple[str, ...]] = [()] * len(executions)
    found, refused = list(executions), dict[str, None]()
    for index, execution in enumerate(executions[: trace.num_in_model] if HEAD in rounds else ()):
        returned = {output for place, output in trace.returned if place == index}
        segment, changed, why = rounded(execution.segment, returned=returned)
        refused.update(dict.fromkeys(why))
        if changed:
            found[index] = replace(execution, segment=segment)
            used[index] = (HEAD,)
    return found, used, list(refused)
