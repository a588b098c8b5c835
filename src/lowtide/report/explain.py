"""What a plan does with one activation, and why, as rows of text."""

from collections.abc import Sequence

from lowtide.errors import LowtideError
from lowtide.facts import Action, Decision, Solution, Step
from lowtide.planning.activations import activations
from lowtide.report.around import Neighbourhoods
from lowtide.report.words import duration, short_source, size

MOST_NAMES = 8
NEAR = 5


def find_decision(solution: Solution, name: str) -> Decision:
    """The decision about the activation `name`; an error that names those which are alike."""
    found = [decision for decision in solution.decisions if decision.name == name]
    if found:
        return found[0]
    alike = [d.name for d in solution.decisions if name and (name in d.name or name in d.module)]
    largest = [d.name for d in sorted(solution.decisions, key=lambda d: (-d.nbytes, d.creation_rank))]
    near = ", ".join((alike or largest)[:NEAR]) or "none"
    raise LowtideError(
        f"the plan has no activation '{name}': there are {len(solution.decisions)}, such as {near}"
    )


def explain_rows(solution: Solution, decision: Decision, step: Step | None = None) -> list[tuple[str, str]]:
    """The decision, and the graph around it where the step is known."""
    rows = [
        ("activation", f"{decision.name}, {size(decision.nbytes)}" + _in(decision.module)),
        ("decision", f"{decision.action}: {decision.reason}"),
        ("adds", duration(decision.seconds) if decision.action is not Action.RETAINED else "nothing"),
        ("holds", f"{size(decision.held_bytes)} of {size(decision.nbytes)} while nobody reads it"),
        (
            "idle",
            f"from op {decision.last_forward_use}, the last in forward that reads it, "
            f"to op {decision.first_backward_use}",
        ),
    ]
    activation = next((a for a in activations(step) if a.name == decision.name), None) if step else None
    if step is None or activation is None:
        return rows
    around = Neighbourhoods(step, solution.schedule.runs).of(activation)
    rows += [
        ("source", short_source(activation.source) or "not known"),
        ("made by", f"{step.nodes[around.maker].op} of {_names(step, around.made_from)}"),
        ("forward", f"read by {_names(step, around.forward)}"),
        ("backward", f"read by {_names(step, around.backward)}"),
    ]
    if around.again:
        said = dict(step.methods)
        runs = [f"{step.nodes[run.node].name} ({said.get(run.method, run.method)})" for run in around.again]
        rows.append(("brought back", f"by {_short(runs)}, from {_names(step, around.again_from)}"))
    return rows


def _in(module: str) -> str:
    return f", in {module}" if module else ""


def _names(step: Step, ranks: Sequence[int]) -> str:
    return _short([step.nodes[rank].name for rank in ranks]) or "nothing"


def _short(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
