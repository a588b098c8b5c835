"""Plans that do not look at the budget: `none`, `all`, `every-block`, `sqrt`."""

from bisect import bisect_left, bisect_right
from itertools import accumulate
from math import isqrt

from lowtide.facts import Node, Region
from lowtide.planning.search.dropped_storages import retain_only
from lowtide.planning.search.table import RematSet, Table, schedule_of
from lowtide.planning.simulate import simulate


def retain_none(table: Table) -> RematSet:
    """Recompute everything that can be: only inputs and fixed values stay."""
    return retain_only(table, ())


def every_block(table: Table) -> RematSet:
    """Retain what passes from one block of the model to another, as `torch.utils.checkpoint` per block does.

    Blocks are the numbered modules (`layers.3`); with several levels of numbers, the level with the
    lowest peak is taken.
    """
    forward = [node for node in table.step.nodes if node.region is Region.FORWARD]
    deepest = max((len(_numbers(node)) for node in forward), default=0)
    plans: dict[RematSet, None] = {}
    for level in range(max(1, deepest)):
        blocks = [_block(node, level) for node in forward]
        kept = {
            storage
            for node in forward
            for read in node.reads
            for storage in table.step.nodes[read].holds
            if read < len(forward) and blocks[read] != blocks[node.rank]
        }
        plans[retain_only(table, kept)] = None
    if len(plans) == 1:
        return next(iter(plans))
    return min(plans, key=lambda plan: simulate(table.step, schedule_of(table, plan)).peak_bytes)


def _numbers(node: Node) -> list[int]:
    """Where the numbered parts of its module path end."""
    parts = node.module.split(".")
    return [i + 1 for i, part in enumerate(parts) if part.isdigit()]


def _block(node: Node, level: int) -> str:
    parts = node.module.split(".")
    numbers = _numbers(node)
    if not numbers:
        return parts[0]
    return ".".join(parts[: numbers[min(level, len(numbers) - 1)]])


def square_root(table: Table) -> RematSet:
    """Cut the forward pass into about √n parts of equal bytes, at narrow places, and retain the cuts."""
    return cut_plan(table, isqrt(len(table.uses)) - 1)


def cut_plan(table: Table, num_cuts: int) -> RematSet:
    """Retain what crosses `num_cuts` places, each the narrowest near its even share of the bytes."""
    made = [0] * (table.first_backward + 1)
    for use in table.uses.values():
        made[use.maker] += table.step.storages[use.storage].nbytes
    total = sum(made)
    kept: set[int] = set()
    if num_cuts < 1 or not total:
        return retain_only(table, kept)
    lives = _forward_lives(table)
    widths = _crossing_bytes(table, lives)
    shares = [seen / total * (num_cuts + 1) for seen in accumulate(made[:-1])]
    for cut in range(1, num_cuts + 1):
        near = range(bisect_left(shares, cut - 0.25), bisect_right(shares, cut + 0.25))
        if near:
            at = min(near, key=lambda rank: (widths[rank], abs(shares[rank] - cut), rank))
            kept |= {storage for storage, first, last in lives if first <= at < last}
    return retain_only(table, kept)


def _forward_lives(table: Table) -> list[tuple[int, int, int]]:
    """(storage, first rank, last forward rank that reads it) of what forward makes."""
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
    """For each forward rank, the bytes that later forward nodes read of what was made up to it."""
    change = [0] * table.first_backward
    for storage, first, last in lives:
        change[first] += table.step.storages[storage].nbytes
        change[last] -= table.step.storages[storage].nbytes
    return list(accumulate(change))
