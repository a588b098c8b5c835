"""Why a budget cannot be met, and what would lower the floor."""

from lowtide.facts import Kind, Region, Step
from lowtide.facts.sizes import format_size
from lowtide.planning.simulate import Timeline


def floor_hint(step: Step, timeline: Timeline) -> str:
    """What holds the bytes at the lowest peak, and what to try."""
    at = timeline.peak_position
    held = {kind: int(series[at]) for kind, series in timeline.bytes_by_kind.items()}
    node = step.nodes[timeline.peak_rank]
    largest = ", ".join(
        f"{format_size(nbytes)} {kind.value.replace('_', ' ')}"
        for kind, nbytes in sorted(held.items(), key=lambda item: -item[1])[:3]
        if nbytes
    )
    if node.region is Region.OPTIMIZER:
        return (
            f"The optimizer step sets it ({largest}), which no recompute lowers. "
            "Try fused=True or foreach=False, or an optimizer with less state such as SGD."
        )
    lasting = held[Kind.PARAMETER] + held[Kind.GRADIENT] + held[Kind.OPTIMIZER_STATE] + held[Kind.BUFFER]
    if 2 * lasting > timeline.peak_bytes:
        state = " or an optimizer with less state such as SGD," if held[Kind.OPTIMIZER_STATE] else ""
        return (
            f"Parameters, gradients and optimizer state set it ({largest}), which no recompute lowers. "
            f"Try{state} a smaller model, or lower precision."
        )
    return f"It holds {largest}. Try that budget, or a smaller batch."
