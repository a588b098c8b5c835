"""The user's own calls of torch.utils.checkpoint, as eager PyTorch runs them without a plan.

    forward      call 1: a b c      call 2: d e f        of each call, its inputs stay live
    backward     d e f again, then their gradients; a b c again, then theirs

A call runs again when its backward pass first needs one of its values, up to the last value that the backward
pass needs, and what it made is freed as the gradients are made. Shortcoming: a call with `use_reentrant=True`
runs to its end, and one with a policy keeps what it has saved longer; a capture does not tell them apart, and
their peaks are predicted some per cent too low.
"""

from collections.abc import Sequence

from lowtide.facts import Action, Node, Region, Remat, Run, Step


def with_own_checkpoints(step: Step, runs: Sequence[Run]) -> tuple[Run, ...]:
    """Runs of a step that runs each node once, with the second runs of the user's checkpoints."""
    again = _second_runs(step)
    if not again:
        return tuple(runs)
    demanded = {
        read
        for some in again.values()
        for run in some
        if (remat := step.nodes[run.rank].remat(run.rule)) is not None
        for read in remat.reads
        if step.nodes[read].on_demand
    }
    found: list[Run] = []
    waiting = sorted(demanded, reverse=True)
    for run in runs:
        while waiting and waiting[-1] < run.rank:
            found.append(Run(waiting.pop()))
        node = step.nodes[run.rank]
        if node.region is Region.BACKWARD and _needs_its_call(step, node):
            found += again.pop(node.own_checkpoint, [])
        found.append(run)
    return tuple(found)


def _needs_its_call(step: Step, node: Node) -> bool:
    number = node.own_checkpoint
    return number > 0 and any(step.nodes[read].own_checkpoint == number for read in node.reads)


def _second_runs(step: Step) -> dict[int, list[Run]]:
    """By number of the call, its second runs."""
    last: dict[int, int] = {}
    for node in step.nodes:
        if node.region is Region.BACKWARD and _needs_its_call(step, node):
            needed = [read for read in node.reads if step.nodes[read].own_checkpoint == node.own_checkpoint]
            last[node.own_checkpoint] = max(last.get(node.own_checkpoint, 0), *needed)
    again: dict[int, list[Run]] = {}
    for node in step.nodes[: step.first_backward_rank]:
        rule = _rule(step, node) if node.rank <= last.get(node.own_checkpoint, -1) else ""
        if node.own_checkpoint and rule:
            again.setdefault(node.own_checkpoint, []).append(Run(node.rank, rule))
    return again


def _rule(step: Step, node: Node) -> str:
    """The rule that runs the node's op again and keeps least for that; empty where there is none."""

    def kept_bytes(remat: Remat) -> int:
        kept = [step.nodes[read] for read in remat.reads if step.nodes[read].on_demand]
        return sum(step.bytes_of(node.makes) for node in kept)

    again = [remat for remat in node.remats if remat.action is Action.RECOMPUTE]
    return min(again, key=kept_bytes).rule if again else ""
