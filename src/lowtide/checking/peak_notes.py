"""Where two measured peaks disagree, or a predicted one is off: which, by how much, and why."""

from lowtide.facts.units import format_size

PREDICTED_WITHIN = 0.01
AGREE_WITHIN = 0.02
SMALL_BYTES = 1 << 20
"""Pages and the allocator's own blocks: below this the kernel's figure says nothing about a step."""


def prediction_note(which: str, *, predicted: int, measured: int, op: str) -> str:
    """Empty where the prediction holds. `op` is what ran at the measured peak, if anybody knows."""
    off = predicted / measured - 1 if measured else 0.0
    if abs(off) <= PREDICTED_WITHIN:
        return ""
    at = f" at {op}" if op else ""
    return (
        f"the peak {which} was predicted as {format_size(predicted)}, {abs(off):.1%} "
        f"{'above' if off > 0 else 'below'} the {format_size(measured)} that were measured{at}"
    )


def agreement_note(which: str, *, measured: int, resident: int | None) -> str:
    """Empty where torch's count and the kernel's agree, or only one of them is there."""
    if resident is None or abs(resident - measured) <= max(AGREE_WITHIN * measured, SMALL_BYTES):
        return ""
    why = (
        "memory that torch does not count, such as buffers of libraries and of Python, or pages that were "
        "given back late"
        if resident > measured
        else "blocks that torch asked for and never wrote to, or that took pages which were there before"
    )
    return (
        f"the two measured peaks {which} disagree: torch counts {format_size(measured)}, the kernel "
        f"{format_size(resident)} ({why})"
    )
