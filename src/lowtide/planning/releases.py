"""Where a forward pass lets go of the values that it offloads: runs of the movable nodes of a step."""

from collections.abc import Mapping, Sequence

from lowtide.facts import Region, Run, Step
from lowtide.planning.link import value_of


def last_forward_reads(step: Step) -> dict[int, int]:
    """By movable node, the rank after which nothing in the forward part of its segment needs its value."""
    movable = [node for node in step.nodes if node.movable]
    last: dict[tuple[int, int], int] = {}
    for node in step.nodes[: step.first_backward_rank] if movable else ():
        if node.on_demand or node.op == "output":
            continue
        for read in node.reads:
            for storage in step.nodes[read].holds:
                last[storage, node.segment] = node.rank
    found: dict[int, int] = {}
    for node in movable:
        value = value_of(step, node.rank)
        reads = [last.get((storage, node.segment), value) for storage in step.nodes[value].holds]
        found[node.rank] = max([value, *reads])
    return found


def with_releases(step: Step, runs: Sequence[Run], after: Mapping[int, int]) -> tuple[Run, ...]:
    """The same runs, each movable node of `after` right after the first run of the rank that it names."""
    present = [run.node for run in runs if run.is_first and run.node in after]
    behind: dict[int, list[int]] = {}
    for leave in sorted(present):
        behind.setdefault(after[leave], []).append(leave)
    found: list[Run] = []
    for run in runs:
        if run.is_first and run.node in after:
            continue
        found.append(run)
        if run.is_first:
            found += [Run(leave) for leave in behind.pop(run.node, ())]
    if behind:
        raise ValueError(f"a value is let go after rank {min(behind)}, which does not run")
    return tuple(found)


def released_after(step: Step, runs: Sequence[Run]) -> dict[int, int]:
    """By movable node that runs, the rank of the last op that runs before it, movable ones apart."""
    found: dict[int, int] = {}
    latest = -1
    for run in runs:
        node = step.nodes[run.node]
        if node.region is not Region.FORWARD:
            break
        if node.movable:
            found[run.node] = latest
        elif not node.on_demand:
            latest = run.node
    return found
