"""What rests on a store between its uses, in words, and the traffic of a step."""

from collections import Counter

from lowtide.facts import Solution
from lowtide.report.style import duration, size

WORDS = {
    "state": "state of {} parameters",
    "frozen": "{} frozen weights",
    "parameters": "{} trained weights",
}


def resting_text(solution: Solution) -> str:
    """`state of 4 parameters`; empty where nothing rests."""
    counts = Counter(name.partition(":")[0] for name in solution.resting)
    return ", ".join(words.format(counts[kind]) for kind, words in WORDS.items() if counts[kind])


def traffic_text(solution: Solution) -> str:
    """`read 12.5 MiB, write 12.5 MiB a step`."""
    found = solution.offload
    if found is None:
        return ""
    return f"{size(found.read_bytes)} read and {size(found.written_bytes)} written in a step"


def hidden_text(solution: Solution) -> str:
    """`in 80 ms, 40 % of it hidden behind the compute`, of all transfers."""
    found = solution.offload
    if found is None or not found.transfer_seconds:
        return ""
    hidden = max(0.0, 1 - found.stall_seconds / found.transfer_seconds)
    return f"all transfers in {duration(found.transfer_seconds)}, {100 * hidden:.0f} % hidden (simulated)"


def resting_lines(solution: Solution) -> list[str]:
    """One line, or none."""
    found = solution.offload
    if found is None or not solution.resting:
        return []
    where = f"{size(found.resting_bytes)} on {found.transfer_speed.store}"
    parts = (f"{resting_text(solution)} ({where})", traffic_text(solution), hidden_text(solution))
    return [", ".join(filter(None, parts))]
