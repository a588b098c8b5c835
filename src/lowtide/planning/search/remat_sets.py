"""Sets of remats: which values a schedule rematerializes, and before which backward node.

Each such set is a valid schedule: a run reads the latest earlier run of each node that it needs, and a node
on demand runs where a remat of the set reads it.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from lowtide.facts import Run
from lowtide.planning.search.table import Table

Rerun = tuple[int, int]
"""(slot, number of a remat)"""

RematSet = frozenset[Rerun]
"""All that a schedule brings back: each remat, and the backward node before which it runs."""


def schedule_of(table: Table, remats: Iterable[Rerun]) -> tuple[Run, ...]:
    """All runs of the step in their order, with these remats."""
    by_slot: dict[int, list[int]] = {}
    for slot, remat in remats:
        by_slot.setdefault(slot, []).append(remat)
    absent = table.on_demand - demanded(table, remats)
    order: list[Run] = []
    for slot in range(table.size):
        for remat in sorted(by_slot.get(slot, ()), key=table.place.__getitem__):
            order.append(Run(table.remats[remat].rank, table.remats[remat].rule))
        if slot not in absent:
            order.append(Run(slot))
    return tuple(order)


def demanded(table: Table, remats: Iterable[Rerun]) -> set[int]:
    """Ranks on demand that these remats read."""
    if not table.on_demand:
        return set()
    return {read for _, remat in remats for read in table.remats[remat].reads if read in table.on_demand}


def remats_in(table: Table, runs: Sequence[Run]) -> RematSet:
    """The remats of a schedule, each before the next first run. KeyError where the step has no such remat."""
    numbers = {(op.rank, op.rule): number for number, op in enumerate(table.remats)}
    found: set[Rerun] = set()
    slot = table.size
    for run in reversed(runs):
        if run.is_first:
            slot = run.rank
        else:
            found.add((slot, numbers[run.rank, run.rule]))
    return frozenset(found)


def retain_only(
    table: Table, kept: Iterable[int], instead: Mapping[int, int] = MappingProxyType({})
) -> RematSet:
    """Retain the storages `kept` and those that cannot be recomputed; recompute the others once.

    A value is recomputed right before the first backward node that needs it, for all later readers as well.
    `instead` maps a rank to the remat to take for it, where that is not the preferred one.
    """
    retained = set(kept)
    need = list(table.first_need)
    found: set[Rerun] = set()
    for rank in table.readers_first:
        remat = instead.get(rank, table.recompute[rank])
        slot = need[rank]
        if remat is None or slot == table.size or retained.issuperset(table.own[rank]):
            continue
        found.add((slot, remat))
        for read in table.remats[remat].reads:
            if slot < need[read] and table.may_recompute(read, slot):
                need[read] = slot
    return frozenset(found)
