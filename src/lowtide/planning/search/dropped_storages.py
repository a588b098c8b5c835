"""Schedules that retain some storages and drop the others, at once or one by one.

A dropped value is recomputed once, right before the first backward node that needs it; all later readers
share that second run. `retain_only` gives the remats for a set of retained storages. `DroppedStorages`
gives peak and seconds after each drop; a drop changes only the blocks near it, and `peak_bytes` equals the
full simulation.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from lowtide.facts import Region
from lowtide.planning.search.table import RematSet, Rerun, Table


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


class Block:
    """One block of memory: made by run `start`, freed after run `end` (both keys of the table)."""

    __slots__ = ("end", "holders", "nbytes", "pinned", "start", "storage")

    def __init__(self, storage: int, nbytes: int, pinned: bool, start: int) -> None:
        self.storage, self.nbytes, self.pinned = storage, nbytes, pinned
        self.start = self.end = start
        self.holders: list[int] = [start]


class DroppedStorages:
    """The step with all storages retained except the dropped ones."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.width = table.width
        self.added_seconds = 0.0
        self._runs: list[list[int]] = [
            [] if rank in table.on_demand else [table.last_key(rank)] for rank in range(table.size)
        ]
        """by rank, the keys of its runs: the first run, and a second one where the value is recomputed"""
        self._readers: dict[int, list[int]] = {keys[0]: [] for keys in self._runs if keys}
        self._held: dict[int, dict[int, Block]] = {}
        self._slot_runs: dict[int, list[int]] = {}
        self._horizon = table.last_key(table.size - 1) if table.size else 0
        self._ending: dict[int, list[Block]] = {}
        # what each slot has more than the one before: a block is two entries, however long its live range
        self._change = np.zeros(table.size + 1, dtype=np.int64)
        self._change[0] = table.static_bytes
        self._extra = np.zeros(table.size, dtype=np.int64)
        self._stale = set(range(table.size))
        self._make_first_runs()
        self._prepare_drops()

    def _make_first_runs(self) -> None:
        ranks = [rank for rank, keys in enumerate(self._runs) if keys]
        for rank in ranks:
            for read in self.table.plain[rank].reads:
                self._readers[self._runs[read][0]].append(self._runs[rank][0])
        for rank in ranks:
            self._hold(self._runs[rank][0])
        for block in {id(b): b for mine in self._held.values() for b in mine.values()}.values():
            self._update_end(block)

    def _prepare_drops(self) -> None:
        table, step = self.table, self.table.step
        self._need = [table.size] * table.size
        """by rank, the first slot that needs its value; `size` where none does"""
        self._slot = [table.size] * table.size
        """by rank, the slot of its second run; `size` where there is none"""
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
                    self._note_need(read, node.rank)

    def drop(self, storage: int) -> None:
        """Retain `storage` no longer. No effect on a value that cannot be recomputed."""
        self._dropped[storage] = True
        todo = list(self._holders.get(storage, ()))
        while todo:
            rank = todo.pop()
            need = self._need[rank]
            if need >= self._slot[rank] or not self._is_dropped(rank):
                continue
            remat = self.table.recompute[rank]
            assert remat is not None
            if self._slot[rank] < self.table.size:
                self._remove(self._slot[rank], remat)
            self._slot[rank] = need
            self._insert(need, remat)
            for read in self.table.remats[remat].reads:
                self._note_need(read, need)
                todo.append(read)

    def _note_need(self, rank: int, slot: int) -> None:
        """Only slots where `rank` may run count; elsewhere its first value is read."""
        if slot < self._need[rank] and self.table.may_recompute(rank, slot):
            self._need[rank] = slot

    def _is_dropped(self, rank: int) -> bool:
        return any(self._dropped[storage] for storage in self.table.step.nodes[rank].holds)

    @property
    def remats(self) -> RematSet:
        recompute = self.table.recompute
        return frozenset(
            (slot, remat)
            for rank, slot in enumerate(self._slot)
            if slot < self.table.size and (remat := recompute[rank]) is not None
        )

    def slot_bytes(self) -> NDArray[np.int64]:
        """The largest number of live bytes in each slot."""
        for slot in self._stale:
            self._extra[slot] = self._extra_bytes(slot)
        self._stale.clear()
        return self._change[:-1].cumsum() + self._extra

    def peak_bytes(self) -> int:
        return int(self.slot_bytes().max(initial=0))

    def _latest(self, rank: int, key: int) -> int:
        """Key of the run of `rank` that a run at `key` reads."""
        keys = self._runs[rank]
        return keys[0] if len(keys) == 1 else keys[bisect_left(keys, key) - 1]

    def _uses(self, key: int) -> list[int]:
        """Keys of the runs that need the whole value of `key`.

        A remat that takes one part of a tuple again reads that part only, which has a block of its own.
        """
        readers = self._readers[key]
        if key not in self.table.tuple_keys:
            return readers
        last = self.width - 1
        return [k for k in readers if k % self.width == last or self.table.remat(k) not in self.table.parts]

    def _insert(self, slot: int, remat: int) -> None:
        table = self.table
        key = table.key(slot, remat)
        op = table.remats[remat]
        rank = op.rank
        assert table.segment[rank] == table.slot_segment[slot]
        keys = self._runs[rank]
        i = bisect_left(keys, key)
        assert i > 0
        assert i == len(keys) or keys[i] != key
        previous = keys[i - 1]
        keys.insert(i, key)
        insort(self._slot_runs.setdefault(slot, []), key)
        self._stale.add(slot)
        earlier = self._readers[previous]
        cut = bisect_right(earlier, key)
        moved = earlier[cut:]
        self._readers[previous] = earlier[:cut]
        self._readers[key] = moved
        touched: dict[int, Block] = {id(b): b for b in self._held[previous].values()}
        for read in op.reads:
            if not self._runs[read]:
                self._begin(read)
            source = self._latest(read, key)
            insort(self._readers[source], key)
            for block in self._held[source].values():
                touched[id(block)] = block
        self._hold(key)
        for block in self._held[key].values():
            touched[id(block)] = block
        self._rehold(moved, rank, touched)
        for block in touched.values():
            self._update_end(block)
        self.added_seconds += op.seconds

    def _remove(self, slot: int, remat: int) -> None:
        table = self.table
        key = table.key(slot, remat)
        op = table.remats[remat]
        rank = op.rank
        keys = self._runs[rank]
        i = bisect_left(keys, key)
        assert keys[i] == key
        previous = keys[i - 1]
        del keys[i]
        mine = self._slot_runs[slot]
        mine.remove(key)
        if not mine:
            del self._slot_runs[slot]
        self._stale.add(slot)
        moved = self._readers.pop(key)
        self._readers[previous].extend(moved)
        self._readers[previous].sort()
        touched: dict[int, Block] = {id(b): b for b in self._held[previous].values()}
        self._rehold(moved, rank, touched)
        for read in op.reads:
            source = self._latest(read, key)
            self._readers[source].remove(key)
            for block in self._held[source].values():
                touched[id(block)] = block
        for block in self._held.pop(key).values():
            block.holders.remove(key)
            touched[id(block)] = block
        for block in touched.values():
            if block.holders:
                self._update_end(block)
            else:
                self._forget(block)
        for read in op.reads:
            if read in table.on_demand and not self._readers[self._runs[read][0]]:
                self._end(read)
        self.added_seconds -= op.seconds

    def _begin(self, rank: int) -> None:
        """Run on demand what a remat keeps from the forward pass; nobody reads it yet."""
        table = self.table
        key = table.last_key(rank)
        op = table.plain[rank]
        self._runs[rank], self._readers[key] = [key], []
        for source in (self._runs[read][0] for read in op.reads):
            insort(self._readers[source], key)
            for block in self._held[source].values():
                self._update_end(block)
        self._hold(key)
        self._stale.add(rank)
        self.added_seconds += op.seconds

    def _end(self, rank: int) -> None:
        """Nobody reads any more what ran on demand."""
        op = self.table.plain[rank]
        (key,) = self._runs[rank]
        self._runs[rank] = []
        del self._readers[key]
        for block in self._held.pop(key).values():
            self._forget(block)
        for source in (self._runs[read][0] for read in op.reads):
            self._readers[source].remove(key)
            for block in self._held[source].values():
                self._update_end(block)
        self._stale.add(rank)
        self.added_seconds -= op.seconds

    def _hold(self, key: int) -> None:
        op = self.table.op(key)
        mine: dict[int, Block] = {}
        for storage, nbytes, pinned in op.fresh:
            block = Block(storage, nbytes, pinned, key)
            slot = key // self.width
            self._change[slot] += nbytes
            self._change[slot + 1] -= nbytes
            self._stale.add(slot)
            if key % self.width != self.width - 1:
                self._ending.setdefault(key, []).append(block)
            mine[storage] = block
        for storage, providers in op.shared:
            block = self._find(key, storage, providers)
            block.holders.append(key)
            mine[storage] = block
        self._held[key] = mine

    def _find(self, key: int, storage: int, providers: tuple[int, ...]) -> Block:
        for read in providers:
            block = self._held[self._latest(read, key)].get(storage)
            if block is not None:
                return block
        name = self.table.step.nodes[self.table.rank(key)].name
        raise ValueError(
            f"'{name}' holds storage {storage}, which it neither makes nor finds in what it reads"
        )

    def _rehold(self, readers: Iterable[int], rank: int, touched: dict[int, Block]) -> None:
        """The runs `readers` now read another run of `rank`: the blocks that they share with it may differ,
        and so may be those of their own readers."""
        todo = [(key, rank) for key in readers]
        while todo:
            key, source = todo.pop()
            mine = self._held[key]
            changed = False
            for storage, providers in self.table.op(key).shared:
                if source in providers:
                    block, old = self._find(key, storage, providers), mine[storage]
                    if block is not old:
                        old.holders.remove(key)
                        block.holders.append(key)
                        mine[storage] = block
                        touched[id(old)], touched[id(block)] = old, block
                        changed = True
            if changed:
                mine_rank = self.table.rank(key)
                todo += [(reader, mine_rank) for reader in self._readers[key]]

    def _update_end(self, block: Block) -> None:
        if block.pinned:
            end = self._horizon
        else:
            end = block.start
            for holder in block.holders:
                # `last_use`, written out: nothing is asked more often
                uses = self._uses(holder) if holder in self.table.tuple_keys else self._readers[holder]
                if uses and uses[-1] > end:
                    end = uses[-1]
                elif holder > end:
                    end = holder
        old = block.end
        if end == old:
            return
        width = self.width
        first, last = old // width, end // width
        if last != first:
            self._change[first + 1] += block.nbytes
            self._change[last + 1] -= block.nbytes
        if old % width != width - 1:
            self._ending[old].remove(block)
        if end % width != width - 1:
            self._ending.setdefault(end, []).append(block)
        self._stale.add(first)
        self._stale.add(last)
        block.end = end

    def _forget(self, block: Block) -> None:
        width = self.width
        first, last = block.start // width, block.end // width
        self._change[first] -= block.nbytes
        self._change[last + 1] += block.nbytes
        if block.end % width != width - 1:
            self._ending[block.end].remove(block)
        self._stale.add(first)
        self._stale.add(last)

    def _extra_bytes(self, slot: int) -> int:
        """The peak of a slot above the bytes of all blocks that the slot's last run makes or finds."""
        keys = self._slot_runs.get(slot)
        last = self.table.last_key(slot)
        if not keys:
            return self.table.plain[slot].workspace_bytes if self._runs[slot] else 0
        made = {
            key: sum(block.nbytes for block in self._held[key].values() if block.start == key)
            for key in (*keys, last)
        }
        change = -sum(made.values())
        most = change - 1
        for key, nbytes in made.items():
            change += nbytes
            most = max(most, change + self.table.op(key).workspace_bytes)
            if key != last:
                change -= sum(block.nbytes for block in self._ending.get(key, ()))
        return most
