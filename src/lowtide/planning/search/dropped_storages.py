"""Schedules that retain some storages and drop the others, at once or one by one.

A dropped value is recomputed once, right before the first backward node that needs it; all later readers
share that second run. `retain_only` gives the remats for a set of retained storages. `DroppedStorages`
gives peak and seconds after each drop; a drop changes only the blocks near it, and `peak_bytes` equals the
full simulation.
"""

from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from lowtide.facts import Region
from lowtide.planning.search.table import Op, RematSet, Rerun, Table


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


Touched = dict[Block, None]
"""Blocks whose live range may change, in a fixed order."""


class DroppedStorages:
    """The step with all storages retained except the dropped ones."""

    def __init__(self, table: Table) -> None:
        self.table, self._width = table, table.width
        self.added_seconds = 0.0
        ranks = [rank for rank in range(table.size) if rank not in table.on_demand]
        self._runs: list[list[int]] = [[] for _ in range(table.size)]
        """by rank, the keys of its runs: the first run, and a second one where the value is recomputed"""
        self._readers: dict[int, list[int]] = {}
        self._held: dict[int, dict[int, Block]] = {}
        """by key of a run, the blocks that its value refers to, by storage"""
        self._slot_runs: dict[int, list[int]] = {}
        self._ending: dict[int, list[Block]] = {}
        # what each slot has more than the one before: a block is two entries, however long its live range
        self._change = np.zeros(table.size + 1, dtype=np.int64)
        self._change[0] = table.static_bytes
        self._extra = np.zeros(table.size, dtype=np.int64)
        self._stale = set(range(table.size))
        touched: Touched = {}
        for rank in ranks:
            touched |= self._start_first(rank)
        self._update(touched)
        self.added_seconds = 0.0
        self._prepare_drops()

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
        return keys[0] if len(keys) == 1 or key <= keys[1] else keys[1]

    def _uses(self, key: int) -> list[int]:
        """Keys of the runs that need the whole value of `key`.

        A remat that takes one part of a tuple again reads that part only, which has a block of its own.
        """
        readers, table = self._readers[key], self.table
        if key not in table.tuple_keys:
            return readers
        return [k for k in readers if self._is_first(k) or table.remat(k) not in table.parts]

    def _is_first(self, key: int) -> bool:
        return key % self._width == self._width - 1

    def _insert(self, slot: int, remat: int) -> None:
        """Recompute a value in a slot; the later readers of its first run read the new run."""
        op, key = self.table.remats[remat], self.table.key(slot, remat)
        assert self.table.segment[op.rank] == self.table.slot_segment[slot]
        (first,) = self._runs[op.rank]
        readers = self._readers[first]
        cut = bisect_right(readers, key)
        self._readers[first], self._readers[key] = readers[:cut], readers[cut:]
        self._runs[op.rank].append(key)
        insort(self._slot_runs.setdefault(slot, []), key)
        for read in op.reads:
            if not self._runs[read]:
                self._update(self._start_first(read))
        touched = dict.fromkeys(self._held[first].values()) | self._start(key, op)
        self._rehold(self._readers[key], op.rank, touched)
        self._update(touched)

    def _remove(self, slot: int, remat: int) -> None:
        """Undo `_insert`."""
        op, key = self.table.remats[remat], self.table.key(slot, remat)
        first, _ = self._runs[op.rank]
        self._runs[op.rank].remove(key)
        self._slot_runs[slot].remove(key)
        moved = self._readers.pop(key)
        self._readers[first] += moved
        touched = dict.fromkeys(self._held[first].values())
        self._rehold(moved, op.rank, touched)
        self._update(touched | self._stop(key, op))
        for read in op.reads:
            if read in self.table.on_demand and not self._readers[self._runs[read][0]]:
                (unread,) = self._runs[read]
                self._update(self._stop(unread, self.table.plain[read]))
                self._runs[read] = []
                del self._readers[unread]

    def _start_first(self, rank: int) -> Touched:
        key = self.table.last_key(rank)
        self._runs[rank], self._readers[key] = [key], []
        return self._start(key, self.table.plain[rank])

    def _start(self, key: int, op: Op) -> Touched:
        """Let a run read and make blocks; the blocks whose end may change."""
        sources = [self._latest(read, key) for read in op.reads]
        for source in sources:
            insort(self._readers[source], key)
        self._held[key] = mine = {
            s: self._new_block(s, nbytes, pinned, key) for s, nbytes, pinned in op.fresh
        }
        for storage, providers in op.shared:
            mine[storage] = self._find(key, storage, providers)
            mine[storage].holders.append(key)
        self._stale.add(key // self._width)
        self.added_seconds += op.seconds
        return dict.fromkeys(block for run in (*sources, key) for block in self._held[run].values())

    def _stop(self, key: int, op: Op) -> Touched:
        """Take a run out; the blocks whose end may change."""
        sources = [self._latest(read, key) for read in op.reads]
        for source in sources:
            self._readers[source].remove(key)
        touched = dict.fromkeys(block for run in (*sources, key) for block in self._held[run].values())
        for block in self._held.pop(key).values():
            block.holders.remove(key)
        self._stale.add(key // self._width)
        self.added_seconds -= op.seconds
        return touched

    def _new_block(self, storage: int, nbytes: int, pinned: bool, key: int) -> Block:
        block, slot = Block(storage, nbytes, pinned, key), key // self._width
        self._change[slot] += nbytes
        self._change[slot + 1] -= nbytes
        if not self._is_first(key):
            self._ending.setdefault(key, []).append(block)
        return block

    def _find(self, key: int, storage: int, providers: tuple[int, ...]) -> Block:
        for read in providers:
            block = self._held[self._latest(read, key)].get(storage)
            if block is not None:
                return block
        name = self.table.step.nodes[self.table.rank(key)].name
        raise ValueError(
            f"'{name}' holds storage {storage}, which it neither makes nor finds in what it reads"
        )

    def _rehold(self, readers: Iterable[int], rank: int, touched: Touched) -> None:
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
                        touched[old] = touched[block] = None
                        changed = True
            if changed:
                mine_rank = self.table.rank(key)
                todo += [(reader, mine_rank) for reader in self._readers[key]]

    def _update(self, touched: Touched) -> None:
        for block in touched:
            if block.holders:
                self._move_end(block, self._end_of(block))
            else:
                self._move_end(block, block.start)
                self._forget(block)

    def _end_of(self, block: Block) -> int:
        """Key of the last run that needs a block."""
        if block.pinned:
            return self.table.last_key(self.table.size - 1)
        end = block.start
        for holder in block.holders:
            # without a call for most holders: nothing is asked more often
            uses = self._uses(holder) if holder in self.table.tuple_keys else self._readers[holder]
            last = uses[-1] if uses else holder
            end = max(end, last, holder)
        return end

    def _move_end(self, block: Block, end: int) -> None:
        if end != block.end:
            first, last = block.end // self._width, end // self._width
            self._change[first + 1] += block.nbytes
            self._change[last + 1] -= block.nbytes
            if not self._is_first(block.end):
                self._ending[block.end].remove(block)
            if not self._is_first(end):
                self._ending.setdefault(end, []).append(block)
            self._stale.update((first, last))
            block.end = end

    def _forget(self, block: Block) -> None:
        slot = block.start // self._width
        self._change[slot] -= block.nbytes
        self._change[slot + 1] += block.nbytes
        if not self._is_first(block.start):
            self._ending[block.start].remove(block)
        self._stale.add(slot)

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
