"""Planners that do not look at the budget: `none`, `all`, `every-block`, `sqrt`. `auto` starts from them."""

from bisect import bisect_left, bisect_right
from itertools import accumulate
from math import isqrt

from lowtide.facts import Node, Region
from lowtide.planning.planning_problem import PlanningProblem
from lowtide.planning.search.table import RematSet, Table


def retain_all(problem: PlanningProblem, budget_bytes: int) -> RematSet:
    """Recompute nothing."""
    return frozenset()


def retain_none(problem: PlanningProblem, budget_bytes: int) -> RematSet:
    """Recompute every value that can be: only inputs and fixed values are retained."""
    return problem.retaining(())


def every_block(problem: PlanningProblem, budget_bytes: int) -> RematSet:
    """Retain the values that one block reads from another, as `torch.utils.checkpoint` per block does.

    Blocks are the numbered modules (`layers.3`). Where blocks contain numbered blocks, the depth with the
    lowest peak is taken.
    """
    table = problem.table
    forward = [node for node in table.step.nodes if node.region is Region.FORWARD]
    deepest = max((len(_numbers(node)) for node in forward), default=0)
    found: dict[RematSet, None] = {}
    for depth in range(max(1, deepest)):
        blocks = [_block(node, depth) for node in forward]
        kept = {
            storage
            for node in forward
            for read in node.reads
            for storage in table.step.nodes[read].holds
            if read < len(forward) and blocks[read] != blocks[node.rank]
        }
        found[problem.retaining(kept)] = None
    if len(found) == 1:
        return next(iter(found))
    return min(found, key=lambda remats: problem.timeline(remats).peak_bytes)


def _numbers(node: Node) -> list[int]:
    """The ends of the numbered parts of a node's module path."""
    parts = node.module.split(".")
    return [i + 1 for i, part in enumerate(parts) if part.isdigit()]


def _block(node: Node, depth: int) -> str:
    parts = node.module.split(".")
    numbers = _numbers(node)
    if not numbers:
        return parts[0]
    return ".".join(parts[: numbers[min(depth, len(numbers) - 1)]])


def square_root(problem: PlanningProblem, budget_bytes: int) -> RematSet:
    """Cut the forward pass into about √n parts of equal bytes, and retain the values that cross the cuts.

    Each cut is at the narrowest rank near its even share of the bytes.
    """
    table = problem.table
    num_cuts = isqrt(len(table.uses)) - 1
    made = [0] * (table.first_backward + 1)
    for use in table.uses.values():
        made[use.maker] += table.step.storages[use.storage].nbytes
    total = sum(made)
    kept: set[int] = set()
    if num_cuts < 1 or not total:
        return problem.retaining(kept)
    lives = _forward_lives(table)
    widths = _crossing_bytes(table, lives)
    shares = [seen / total * (num_cuts + 1) for seen in accumulate(made[:-1])]
    for cut in range(1, num_cuts + 1):
        near = range(bisect_left(shares, cut - 0.25), bisect_right(shares, cut + 0.25))
        if near:
            at = min(near, key=lambda rank: (widths[rank], abs(shares[rank] - cut), rank))
            kept |= {storage for storage, first, last in lives if first <= at < last}
    return problem.retaining(kept)


def _forward_lives(table: Table) -> list[tuple[int, int, int]]:
    """(storage, rank of its maker, rank of its last forward reader) of the storages that forward makes."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    nodes, storages = table.step.nodes, table.step.storages
    for node in nodes[: table.first_backward]:
        for storage in node.makes:
            if not storages[storage].static and not storages[storage].pinned:
                first.setdefault(storage, node.rank)
        for read in node.reads:
            for storage in nodes[read].holds:
                last[storage] = node.rank
    return [(storage, rank, last.get(storage, rank)) for storage, rank in first.items()]


def _crossing_bytes(table: Table, lives: list[tuple[int, int, int]]) -> list[int]:
    """For each forward rank, the bytes made up to that rank that later forward nodes read."""
    change = [0] * table.first_backward
    for storage, first, last in lives:
        change[first] += table.step.storages[storage].nbytes
        change[last] -= table.step.storages[storage].nbytes
    return list(accumulate(change))
