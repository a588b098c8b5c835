"""Drop storages one by one; what backward needs of them is run again once, where it is first needed.

This is how the planners that only choose a set of activations get their schedule: a dropped value
is recomputed right before the first backward node that needs it, and shared by all later ones.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from lowtide.facts import Region
from lowtide.planning.search.runs import Rerun, Runs
from lowtide.planning.search.table import Table


class LazyRuns(Runs):
    """Runs of "everything retained but what was dropped"."""

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        step = table.step
        self._never = table.size
        self._need = [self._never] * table.size
        self._slot = [self._never] * table.size
        self._dropped = [
            storage.id not in table.uses and not storage.static and not storage.pinned
            for storage in step.storages
        ]
        self._holders: dict[int, list[int]] = {}
        for node in step.nodes:
            if node.region is Region.FORWARD:
                for storage in node.holds:
                    self._holders.setdefault(storage, []).append(node.rank)
            else:
                for read in node.reads:
                    self._needed(read, node.rank)

    def drop(self, storage: int) -> None:
        """Retain `storage` no longer. No effect on what can never be run again."""
        self._dropped[storage] = True
        todo = list(self._holders.get(storage, ()))
        while todo:
            rank = todo.pop()
            need = self._need[rank]
            if need >= self._slot[rank] or not self._is_gone(rank):
                continue
            remat = self.table.recompute[rank]
            assert remat is not None
            if self._slot[rank] < self._never:
                self.remove(self._slot[rank], remat)
            self._slot[rank] = need
            self.insert(need, remat)
            for read in self.table.remats[remat].reads:
                self._needed(read, need)
                todo.append(read)

    def _needed(self, rank: int, slot: int) -> None:
        """Only slots where `rank` may run count; elsewhere its first value is read."""
        if slot < self._need[rank] and self.table.may_recompute(rank, slot):
            self._need[rank] = slot

    def _is_gone(self, rank: int) -> bool:
        return any(self._dropped[storage] for storage in self.table.step.nodes[rank].holds)


def lazy_plan(
    table: Table, kept: Iterable[int], instead: Mapping[int, int] = MappingProxyType({})
) -> frozenset[Rerun]:
    """The plan that retains only the storages `kept` and what can never be run again; `instead` are remats,
    by rank, to take where their rank is to be brought back."""
    stays = set(kept)
    need = list(table.first_need)
    plan: set[Rerun] = set()
    for rank in table.readers_first:
        remat = instead.get(rank, table.recompute[rank])
        slot = need[rank]
        if remat is None or slot == table.size or stays.issuperset(table.own[rank]):
            continue
        plan.add((slot, remat))
        for read in table.remats[remat].reads:
            if slot < need[read] and table.may_recompute(read, slot):
                need[read] = slot
    return frozenset(plan)
