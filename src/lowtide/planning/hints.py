"""Why a budget cannot be met, and what would lower the floor."""

from collections.abc import Mapping, Sequence

from lowtide.facts import Kind, Region, Step
from lowtide.facts.units import format_size
from lowtide.planning.simulate import Timeline

LASTING = {
    Kind.PARAMETER: "parameters",
    Kind.GRADIENT: "gradients",
    Kind.OPTIMIZER_STATE: "optimizer state",
    Kind.BUFFER: "buffers",
}
"""What is held from step to step or to the end of one: no recompute lowers it."""


def floor_hint(step: Step, timeline: Timeline) -> str:
    """What holds the bytes at the lowest peak, and what to try."""
    at = timeline.peak_position
    held = {kind: int(series[at]) for kind, series in timeline.bytes_by_kind.items()}
    return hint(step.nodes[timeline.peak_rank].region, held)


def hint(region: Region, held: Mapping[Kind, int]) -> str:
    """The same from the region where the lowest peak is, and the bytes held there by kind."""
    largest = ", ".join(
        f"{format_size(nbytes)} {kind.value.replace('_', ' ')}"
        for kind, nbytes in sorted(held.items(), key=lambda item: -item[1])[:3]
        if nbytes
    )
    lighter = ["an optimizer with less state such as SGD"] if held.get(Kind.OPTIMIZER_STATE) else []
    if region is Region.OPTIMIZER:
        remedies = ["fused=True", "foreach=False", *lighter]
        return (
            f"The optimizer step sets it ({largest}), which no recompute lowers. "
            f"Try {listed(remedies, 'or')}."
        )
    lasting = {words: held[kind] for kind, words in LASTING.items() if held.get(kind)}
    if lasting and 2 * sum(lasting.values()) > sum(held.values()):
        remedies = [*lighter, "a smaller model", "lower precision"]
        return (
            f"{listed(list(lasting), 'and').capitalize()} set it ({largest}), which no recompute lowers. "
            f"Try {listed(remedies, 'or')}."
        )
    return f"It holds {largest}. Try that budget, or a smaller batch."


def listed(items: Sequence[str], last: str) -> str:
    """`a`, `a or b`, `a, b or c`."""
    *rest, end = items
    return f"{', '.join(rest)} {last} {end}" if rest else end
