"""The decision about one activation and its reason, as rows of text, and the graph around it.

The graph has the ops that make and read the activation, without and with the plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.errors import LowtideError
from lowtide.facts import Action, Activation, Decision, Region, Run, Solution, Step
from lowtide.planning.activations import activations
from lowtide.planning.simulate import is_remat, source_of
from lowtide.report.page_packing import pack_integers
from lowtide.report.style import duration, short_source, size


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """Ranks of nodes. `again`: runs that rematerialize the activation, each with its position. `again_from`:
    the first-run values that these runs read."""

    maker: int
    made_from: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    again: tuple[Run, ...] = ()
    again_from: tuple[int, ...] = ()


class Neighbourhoods:
    """The surroundings of all activations of a step, for one schedule."""

    def __init__(self, step: Step, runs: Sequence[Run] = ()) -> None:
        self.step = step
        self._holders: dict[int, list[int]] = {}
        self._readers: dict[int, list[int]] = {}
        for node in step.nodes:
            for storage in node.holds:
                self._holders.setdefault(storage, []).append(node.rank)
            for read in node.reads:
                self._readers.setdefault(read, []).append(node.rank)
        self._again = {run.rank: run for run in runs if is_remat(step, run)}

    def of(self, activation: Activation) -> Around:
        nodes = self.step.nodes
        holders = self._holders[activation.storage]
        readers = sorted({reader for rank in holders for reader in self._readers.get(rank, ())} - {*holders})
        again = self._chain([rank for rank in holders if rank in self._again])
        made = {run.rank for run in again}
        sources = sorted({read for run in again for read in source_of(self.step, run).reads} - made)
        return Around(
            maker=activation.creation_rank,
            made_from=nodes[activation.creation_rank].reads,
            forward=tuple(r for r in readers if nodes[r].region is Region.FORWARD),
            backward=tuple(r for r in readers if nodes[r].region is not Region.FORWARD),
            again=again,
            again_from=tuple(sources),
        )

    def _chain(self, ranks: Sequence[int]) -> tuple[Run, ...]:
        """The runs that rematerialize these values, with the rematerialized values that they read."""
        found: dict[int, Run] = {}
        waiting = list(ranks)
        while waiting:
            rank = waiting.pop()
            if rank in self._again and rank not in found:
                found[rank] = self._again[rank]
                waiting += source_of(self.step, found[rank]).reads
        return tuple(found[rank] for rank in sorted(found))


def pack_around(step: Step, runs: Sequence[Run], decisions: Sequence[Decision]) -> str:
    """The data of `templates/around.js`: every decision's maker, then five lists, each after its length."""
    found = {activation.name: activation for activation in activations(step)}
    neighbourhoods = Neighbourhoods(step, runs)
    flat: list[int] = []
    for decision in decisions:
        if decision.name not in found:
            flat += [decision.creation_rank, 0, 0, 0, 0, 0]
            continue
        around = neighbourhoods.of(found[decision.name])
        again = tuple(run.rank for run in around.again)
        flat.append(around.maker)
        for ranks in (around.made_from, around.forward, around.backward, again, around.again_from):
            flat += [len(ranks), *ranks]
    return pack_integers(flat)


MOST_NAMES = 8
NEAR = 5


def find_decision(solution: Solution, name: str) -> Decision:
    """The decision about the activation `name`; the error for an unknown name lists similar ones."""
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
        ("live while idle", f"{size(decision.held_bytes)} of {size(decision.nbytes)}"),
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
        said = dict(step.rules)
        runs = [f"{step.nodes[run.rank].name} ({said.get(run.rule, run.rule)})" for run in around.again]
        rows.append(("rematerialized", f"by {_short(runs)}, from {_names(step, around.again_from)}"))
    return rows


def _in(module: str) -> str:
    return f", in {module}" if module else ""


def _names(step: Step, ranks: Sequence[int]) -> str:
    return _short([step.nodes[rank].name for rank in ranks]) or "nothing"


def _short(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
