"""A profile or a plan in a few lines of text, and as rows for a notebook."""

from lowtide.facts import Action, Kind, Solution, Step
from lowtide.planning.simulate import Timeline
from lowtide.report.palette import LABELS, STACK
from lowtide.report.words import duration, how_good, percent, size

Rows = list[tuple[str, str]]


def profile_rows(step: Step, timeline: Timeline) -> Rows:
    node = step.nodes[timeline.peak_rank]
    place = ", ".join(filter(None, (str(node.region), node.module, node.source)))
    return [
        ("peak", f"{size(timeline.peak_bytes)} at '{node.name}' ({place})"),
        ("of which", ", ".join(f"{LABELS[kind]} {size(nbytes)}" for kind, nbytes in _at_peak(timeline))),
        ("step", f"{duration(timeline.seconds)}, {len(step.nodes)} nodes on {step.device}"),
        *(("note", note) for note in step.notes),
    ]


def plan_rows(solution: Solution) -> Rows:
    fates = [decision.action for decision in solution.decisions]
    counts = ", ".join(f"{fates.count(action)} {action.lower()}" for action in Action if action in fates)
    saved = solution.peak_bytes / solution.baseline_peak_bytes - 1 if solution.baseline_peak_bytes else None
    return [
        ("budget", size(solution.budget_bytes)),
        ("peak", f"{size(solution.peak_bytes)}, predicted, at '{solution.peak_node}'"),
        ("without it", f"{size(solution.baseline_peak_bytes)} ({percent(saved)})"),
        (
            "time added",
            f"{duration(solution.recompute_seconds)} ({percent(solution.overhead)}), "
            f"{how_good(solution.gap)}",
        ),
        ("activations", counts or "none"),
        *(("note", note) for note in solution.notes),
    ]


def as_text(title: str, rows: Rows) -> str:
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def _at_peak(timeline: Timeline) -> list[tuple[Kind, int]]:
    at = {kind: int(timeline.bytes_by_kind[kind][timeline.peak_position]) for kind in STACK}
    return [(kind, nbytes) for kind, nbytes in at.items() if nbytes]
