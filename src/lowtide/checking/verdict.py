"""The answer of a verification in a few lines: does it fit, is it exact, and what was not measured well."""

from typing import TYPE_CHECKING

from lowtide.report.words import NOT_BY_RECOMPUTING, is_noisy, size

if TYPE_CHECKING:
    from lowtide.checking.verification import Verification

MAX_DIFFERENCES = 5


def verdict(result: "Verification") -> list[str]:
    lines = [kept(result.measured_peak_bytes, result.budget_bytes)]
    if result.exact and result.from_eager:
        lines.append("results: equal to the compiled step without recompute, to the last bit")
    elif result.exact:
        lines.append("results: equal to eager training to the last bit")
    else:
        lines.append(f"results: DIFFERENT from eager training in {len(result.differences)} places")
        lines += [f"  {difference}" for difference in result.differences[:MAX_DIFFERENCES]]
        if result.recompute_exact:
            lines.append(f"note: {NOT_BY_RECOMPUTING}")
    if is_noisy(result.overhead, result.noise):
        lines.append(
            "note: the time added is too noisy to tell: the machine is busy, or it adds next to none"
        )
    lines += [f"note: {note}" for note in result.notes]
    if not result.fresh_process:
        lines.append("note: measured in this process, since the model cannot be sent to a fresh one")
    return lines


def kept(peak_bytes: int, budget_bytes: int) -> str:
    over = "at or below" if peak_bytes <= budget_bytes else "ABOVE"
    return f"peak: {size(peak_bytes)}, {over} the budget of {size(budget_bytes)}"
