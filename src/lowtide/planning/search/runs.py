"""The runs of a plan and the bytes of every slot, kept up to date as single runs come and go.

A plan is a set of (slot, remat): before backward node `slot`, bring a forward value back by a remat of
the table. Every such set is a valid schedule, because a run reads the latest earlier run of what it
needs, and what runs on demand comes and goes with its readers. Putting in or taking out one run touches
only the blocks near it; `peak_bytes` equals the full simulation.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from lowtide.facts import Run
from lowtide.planning.search.table import Table

Rerun = tuple[int, int]
"""(slot, number of a remat)"""

RematSet = frozenset[Rerun]
"""All that a schedule brings back: each remat, and the backward node before which it runs."""


def schedule_of(table: Table, plan: Iterable[Rerun]) -> tuple[Run, ...]:
    """All runs of a plan in their order."""
    by_slot: dict[int, list[int]] = {}
    for slot, remat in plan:
        by_slot.setdefault(slot, []).append(remat)
    absent = table.on_demand - demanded(table, plan)
    order: list[Run] = []
    for slot in range(table.size):
        for remat in sorted(by_slot.get(slot, ()), key=table.place.__getitem__):
            order.append(Run(table.remats[remat].rank, table.remats[remat].rule))
        if slot not in absent:
            order.append(Run(slot))
    return tuple(order)


def demanded(table: Table, plan: Iterable[Rerun]) -> set[int]:
    """Ranks that run only for the sake of this plan."""
    if not table.on_demand:
        return set()
    return {read for _, remat in plan for read in table.remats[remat].reads if read in table.on_demand}


def added_seconds(table: Table, plan: Iterable[Rerun]) -> list[float]:
    """What every run of a plan takes that the plain step does not have."""
    chosen = sorted(plan)
    again = [table.remats[remat].seconds for _, remat in chosen]
    return again + [table.plain[rank].seconds for rank in sorted(demanded(table, chosen))]


class Block:
    """One block of memory: made by run `start`, freed after run `end` (both keys)."""

    __slots__ = ("end", "holders", "nbytes", "pinned", "start", "storage")

    def __init__(self, storage: int, nbytes: int, pinned: bool, start: int) -> None:
        self.storage, self.nbytes, self.pinned = storage, nbytes, pinned
        self.start = self.end = start
        self.holders: list[int] = [start]


class Runs:
    """Mutable state of one plan under construction; see the module's text."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.width = table.width
        self.runs: list[list[int]] = [
            [] if rank in table.on_demand else [table.last_key(rank)] for rank in range(table.size)
        ]
        self.readers: dict[int, list[int]] = {keys[0]: [] for keys in self.runs if keys}
        self.held: dict[int, dict[int, Block]] = {}
        self.slot_runs: dict[int, list[int]] = {}
        self.added_seconds = 0.0
        self.num_recomputes = 0
        self.num_changes = 0
        self.journal: list[tuple[bool, int, int]] = []
        self._horizon = table.last_key(table.size - 1) if table.size else 0
        self._ending: dict[int, list[Block]] = {}
        # what each slot has more than the one before: a block is two entries, however long it is held
        self._change = np.zeros(table.size + 1, dtype=np.int64)
        self._change[0] = table.static_bytes
        self._extra = np.zeros(table.size, dtype=np.int64)
        self._peak_key = [table.last_key(rank) for rank in range(table.size)]
        self._dirty = set(range(table.size))
        always = [rank for rank in range(table.size) if rank not in table.on_demand]
        for rank in always:
            key = self.runs[rank][0]
            for read in table.plain[rank].reads:
                self.readers[self.runs[read][0]].append(key)
        for rank in always:
            self._hold(self.runs[rank][0])
        for block in {id(b): b for mine in self.held.values() for b in mine.values()}.values():
            self._update_end(block)
        self.forward_blocks = [
            block
            for rank in always
            if rank < table.first_backward
            for block in self.held[self.runs[rank][0]].values()
            if block.start == self.runs[rank][0] and not block.pinned and block.nbytes
        ]

    # -- what a plan is asked for

    def slot_bytes(self) -> NDArray[np.int64]:
        """The largest number of bytes held at any moment of each slot."""
        self._refresh()
        return self._change[:-1].cumsum() + self._extra

    def peak_bytes(self) -> int:
        return int(self.slot_bytes().max(initial=0))

    def peak_key(self, slot: int) -> int:
        """The run of `slot` during which the slot's bytes are held."""
        self._refresh()
        return self._peak_key[slot]

    def schedule(self) -> tuple[Run, ...]:
        return schedule_of(self.table, self.plan())

    def plan(self) -> frozenset[Rerun]:
        return frozenset(
            (slot, self.table.remat(key)) for slot, keys in self.slot_runs.items() for key in keys
        )

    def latest(self, rank: int, key: int) -> int:
        """Key of the run of `rank` that a run at `key` reads."""
        keys = self.runs[rank]
        return keys[0] if len(keys) == 1 else keys[bisect_left(keys, key) - 1]

    def next_run(self, rank: int, key: int) -> int | None:
        """Key of the first run of `rank` after `key`."""
        keys = self.runs[rank]
        i = bisect_right(keys, key)
        return keys[i] if i < len(keys) else None

    def uses(self, key: int) -> list[int]:
        """Keys of the runs that need all of the value of `key`: its readers, but for those that take a
        part of a first value again, which stands by itself.
        """
        readers = self.readers[key]
        if key not in self.table.tuple_keys:
            return readers
        last = self.width - 1
        return [k for k in readers if k % self.width == last or self.table.remat(k) not in self.table.parts]

    def last_use(self, key: int) -> int:
        uses = self.uses(key)
        return uses[-1] if uses else key

    # -- changes

    def insert(self, slot: int, remat: int) -> None:
        table = self.table
        key = table.key(slot, remat)
        op = table.remats[remat]
        rank = op.rank
        assert table.segment[rank] == table.slot_segment[slot]
        keys = self.runs[rank]
        i = bisect_left(keys, key)
        assert i > 0
        assert i == len(keys) or keys[i] != key
        previous = keys[i - 1]
        keys.insert(i, key)
        insort(self.slot_runs.setdefault(slot, []), key)
        self._dirty.add(slot)
        earlier = self.readers[previous]
        cut = bisect_right(earlier, key)
        moved = earlier[cut:]
        self.readers[previous] = earlier[:cut]
        self.readers[key] = moved
        touched: dict[int, Block] = {id(b): b for b in self.held[previous].values()}
        for read in op.reads:
            if not self.runs[read]:
                self._begin(read)
            source = self.latest(read, key)
            insort(self.readers[source], key)
            for block in self.held[source].values():
                touched[id(block)] = block
        self._hold(key)
        for block in self.held[key].values():
            touched[id(block)] = block
        for reader in moved:
            self._rehold(reader, rank, touched)
        for block in touched.values():
            self._update_end(block)
        self.added_seconds += op.seconds
        self.num_recomputes += 1
        self.num_changes += 1
        self.journal.append((True, slot, remat))

    def remove(self, slot: int, remat: int) -> None:
        table = self.table
        key = table.key(slot, remat)
        op = table.remats[remat]
        rank = op.rank
        keys = self.runs[rank]
        i = bisect_left(keys, key)
        assert keys[i] == key
        previous = keys[i - 1]
        del keys[i]
        mine = self.slot_runs[slot]
        mine.remove(key)
        if not mine:
            del self.slot_runs[slot]
        self._dirty.add(slot)
        moved = self.readers.pop(key)
        self.readers[previous].extend(moved)
        self.readers[previous].sort()
        touched: dict[int, Block] = {id(b): b for b in self.held[previous].values()}
        for reader in moved:
            self._rehold(reader, rank, touched)
        for read in op.reads:
            source = self.latest(read, key)
            self.readers[source].remove(key)
            for block in self.held[source].values():
                touched[id(block)] = block
        for block in self.held.pop(key).values():
            block.holders.remove(key)
            touched[id(block)] = block
        for block in touched.values():
            if block.holders:
                self._update_end(block)
            else:
                self._forget(block)
        for read in op.reads:
            if read in table.on_demand and not self.readers[self.runs[read][0]]:
                self._end(read)
        self.added_seconds -= op.seconds
        self.num_recomputes -= 1
        self.num_changes += 1
        self.journal.append((False, slot, remat))

    def _begin(self, rank: int) -> None:
        """Run on demand what a remat keeps from the forward pass; nobody reads it yet."""
        table = self.table
        key = table.last_key(rank)
        op = table.plain[rank]
        self.runs[rank], self.readers[key] = [key], []
        for source in (self.runs[read][0] for read in op.reads):
            insort(self.readers[source], key)
            for block in self.held[source].values():
                self._update_end(block)
        self._hold(key)
        self._dirty.add(rank)
        self.added_seconds += op.seconds

    def _end(self, rank: int) -> None:
        """Nobody reads any more what ran on demand."""
        op = self.table.plain[rank]
        (key,) = self.runs[rank]
        self.runs[rank] = []
        del self.readers[key]
        for block in self.held.pop(key).values():
            self._forget(block)
        for source in (self.runs[read][0] for read in op.reads):
            self.readers[source].remove(key)
            for block in self.held[source].values():
                self._update_end(block)
        self._dirty.add(rank)
        self.added_seconds -= op.seconds

    def rollback(self, mark: int) -> None:
        """Undo every change since the journal had `mark` entries."""
        while len(self.journal) > mark:
            inserted, slot, remat = self.journal[-1]
            if inserted:
                self.remove(slot, remat)
            else:
                self.insert(slot, remat)
            del self.journal[-2:]

    def go_to(self, plan: Iterable[Rerun]) -> None:
        """Become `plan`, by the difference to what is there."""
        wanted, here = frozenset(plan), self.plan()
        for slot, remat in sorted(here - wanted, reverse=True):
            self.remove(slot, remat)
        for slot, remat in sorted(wanted - here):
            self.insert(slot, remat)
        self.journal.clear()
        self.added_seconds = sum(added_seconds(self.table, wanted))

    # -- blocks

    def _hold(self, key: int) -> None:
        op = self.table.op(key)
        mine: dict[int, Block] = {}
        for storage, nbytes, pinned in op.fresh:
            block = Block(storage, nbytes, pinned, key)
            slot = key // self.width
            self._change[slot] += nbytes
            self._change[slot + 1] -= nbytes
            self._dirty.add(slot)
            if key % self.width != self.width - 1:
                self._ending.setdefault(key, []).append(block)
            mine[storage] = block
        for storage, providers in op.shared:
            block = self._find(key, storage, providers)
            block.holders.append(key)
            mine[storage] = block
        self.held[key] = mine

    def _find(self, key: int, storage: int, providers: tuple[int, ...]) -> Block:
        for read in providers:
            block = self.held[self.latest(read, key)].get(storage)
            if block is not None:
                return block
        name = self.table.step.nodes[self.table.rank(key)].name
        raise ValueError(
            f"'{name}' holds storage {storage}, which it neither makes nor finds in what it reads"
        )

    def _rehold(self, key: int, source: int, touched: dict[int, Block]) -> None:
        """The run `key` now reads another run of rank `source`: its shared blocks may be others."""
        changed = False
        mine = self.held[key]
        for storage, providers in self.table.op(key).shared:
            if source in providers:
                block = self._find(key, storage, providers)
                old = mine[storage]
                if block is not old:
                    old.holders.remove(key)
                    block.holders.append(key)
                    mine[storage] = block
                    touched[id(old)], touched[id(block)] = old, block
                    changed = True
        if changed:
            rank = self.table.rank(key)
            for reader in self.readers[key]:
                self._rehold(reader, rank, touched)

    def _update_end(self, block: Block) -> None:
        if block.pinned:
            end = self._horizon
        else:
            end = block.start
            for holder in block.holders:
                # `last_use`, written out: nothing is asked more often
                uses = self.uses(holder) if holder in self.table.tuple_keys else self.readers[holder]
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
        self._dirty.add(first)
        self._dirty.add(last)
        block.end = end

    def _forget(self, block: Block) -> None:
        width = self.width
        first, last = block.start // width, block.end // width
        self._change[first] -= block.nbytes
        self._change[last + 1] += block.nbytes
        if block.end % width != width - 1:
            self._ending[block.end].remove(block)
        self._dirty.add(first)
        self._dirty.add(last)

    def _refresh(self) -> None:
        for slot in self._dirty:
            keys = self.slot_runs.get(slot)
            last = slot * self.width + self.width - 1
            if not keys:
                runs = self.runs[slot]
                self._extra[slot] = self.table.plain[slot].workspace_bytes if runs else 0
                self._peak_key[slot] = last
                continue
            keys = [*keys, last]
            made = []
            for key in keys:
                new = 0
                for block in self.held[key].values():
                    if block.start == key:
                        new += block.nbytes
                made.append(new)
            change = -sum(made)
            most, where = change - 1, last
            for key, new in zip(keys, made, strict=True):
                change += new
                here = change + self.table.op(key).workspace_bytes
                if here > most:
                    most, where = here, key
                if key != last:
                    for block in self._ending.get(key, ()):
                        change -= block.nbytes
            self._extra[slot] = most
            self._peak_key[slot] = where
        self._dirty.clear()
