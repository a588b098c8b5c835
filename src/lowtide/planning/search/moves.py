"""Two moves: evict a block from a gap in its use, and merge a copy back into it.

Both are first estimated from the slots' bytes, then made on the real state, and undone by the
caller when they do not help. `excess` is what each slot holds above the target.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lowtide.planning.search.runs import Block, Rerun, Runs

SMALL_SHARE = 0.5
"""Rather than recompute through a value of at most this share of the evicted bytes, retain it."""


class RunsView:
    """The slots' bytes against a target, as they were when the view was taken."""

    __slots__ = ("bytes", "excess", "excess_bytes", "target", "until")

    def __init__(self, runs: Runs, target: int) -> None:
        self.target = target
        self.bytes: NDArray[np.int64] = runs.slot_bytes()
        self.excess: NDArray[np.int64] = np.maximum(self.bytes - target, 0)
        self.until: NDArray[np.int64] = np.concatenate(([0], np.cumsum(self.excess)))
        self.excess_bytes = int(self.until[-1])


@dataclass(frozen=True, slots=True)
class Eviction:
    """Free a block after one of its uses; run the remats `again` in `slot`, where it is next used."""

    slot: int
    again: tuple[int, ...]
    instead: tuple[Rerun, ...]
    """later runs that bring the same values back, which the new ones make needless"""
    seconds: float
    gain: float
    """bytes won, less when only a small part of the excess is covered"""
    passes_through: bool
    """whether it recomputes values that could have been retained instead"""


def block_uses(runs: Runs, block: Block) -> list[int]:
    uses = [block.start]
    for holder in block.holders:
        uses += runs.uses(holder)
    uses.sort()
    return uses


def is_live(runs: Runs, block: Block) -> bool:
    """False for a block that a later change took away."""
    mine = runs.held.get(block.start)
    return mine is not None and mine.get(block.storage) is block


@dataclass(frozen=True, slots=True)
class Gap:
    """Where `block` is idle: after its use at key `before`, until it is needed in `slot`."""

    block: Block
    before: int
    slot: int
    gain: float


def best_eviction(runs: Runs, view: RunsView, block: Block) -> Eviction | None:
    """The gap of `block` that covers most excess, and the cheapest way to bring it back after it."""
    gap = _best_gap(runs, view, block)
    if gap is None:
        return None
    found = _bring_back(runs, view, gap, small_bytes=0)
    if found is not None and found.passes_through:
        found = _cheaper(found, _bring_back(runs, view, gap, small_bytes=int(SMALL_SHARE * block.nbytes)))
    for remat in runs.table.choices.get(block.storage, ()):
        found = _cheaper(found, _bring_back(runs, view, gap, small_bytes=0, by=remat))
    return found


def _cheaper(one: Eviction | None, other: Eviction | None) -> Eviction | None:
    """The one that costs less per byte; the first of equals."""
    if one is None or other is None:
        return one or other
    return other if other.seconds * one.gain < one.seconds * other.gain else one


def _best_gap(runs: Runs, view: RunsView, block: Block) -> Gap | None:
    width, until = runs.width, view.until
    if block.pinned or until[block.end // width + 1] == until[block.start // width]:
        return None
    best: Gap | None = None
    for before, after in pairwise(block_uses(runs, block)):
        first, slot = before // width, after // width
        if slot == first or runs.table.slot_segment[slot] < 0:
            continue
        if runs.peak_key(first) <= before:
            first += 1
        covered = int(until[slot] - until[first])
        if covered:
            gain = block.nbytes * (covered / view.excess_bytes) ** 0.5
            if gain > (best.gain if best is not None else 0):
                best = Gap(block, before, slot, gain)
    return best


def _bring_back(
    runs: Runs, view: RunsView, gap: Gap, *, small_bytes: int, by: int | None = None
) -> Eviction | None:
    """`by`: the remat to take for its node, instead of that node's preferred one."""
    table, slot, block = runs.table, gap.slot, gap.block
    way = _walk_back(runs, gap, small_bytes, by)
    if way is None:
        return None
    again, lengthened, passes_through = way
    started = _started(runs, again)
    added = sum(b.nbytes for b in lengthened.values())
    added += sum(nbytes for rank in started for _, nbytes, _ in table.plain[rank].fresh)
    if added >= block.nbytes:
        return None
    seconds, instead = sum(table.plain[rank].seconds for rank in started), []
    for remat in again:
        op = table.remats[remat]
        later = runs.next_run(op.rank, table.key(slot, remat))
        made = sum(nbytes for _, nbytes, _ in op.fresh)
        if later is not None and _fits_between(view, slot, later // runs.width, made):
            instead.append((later // runs.width, table.remat(later)))
        else:
            seconds += op.seconds
    gain = gap.gain * (block.nbytes - added) / block.nbytes
    return Eviction(slot, tuple(again), tuple(instead), seconds, gain, passes_through)


def _started(runs: Runs, again: list[int]) -> list[int]:
    """Ranks on demand that these remats would be the first to read."""
    table = runs.table
    if not table.on_demand:
        return []
    reads = {read: None for remat in again for read in table.remats[remat].reads}
    return [read for read in reads if not runs.runs[read]]


def _walk_back(
    runs: Runs, gap: Gap, small_bytes: int, by: int | None
) -> tuple[list[int], dict[int, Block], bool] | None:
    """Remats for the gap's slot, in the order they can run, and blocks that must live until then.

    None when something would have to run that may not. The last value says whether recomputing
    went through values that could have been retained.
    """
    table, slot, block = runs.table, gap.slot, gap.block
    start_of_slot = slot * runs.width
    stack = [table.rank(h) for h in block.holders if h <= gap.before and runs.last_use(h) > gap.before]
    again: dict[int, int] = {}
    lengthened: dict[int, Block] = {}
    passes_through = False
    chosen = -1 if by is None else table.remats[by].rank
    while stack:
        rank = stack.pop()
        if rank in again:
            continue
        if not table.may_run(rank, slot):
            return None
        remat = by if by is not None and rank == chosen else table.again[rank][0]
        again[rank] = remat
        for read in table.remats[remat].reads:
            if not runs.runs[read]:
                continue
            held = runs.held[runs.latest(read, table.key(slot, remat))].values()
            gone = [b for b in held if b is block or b.end < start_of_slot]
            if not gone or read in again:
                continue
            if block in gone:
                stack.append(read)
            elif (
                table.may_run(read, slot)
                and sum(b.nbytes for b in gone if id(b) not in lengthened) > small_bytes
            ):
                passes_through = True
                stack.append(read)
            else:
                lengthened.update((id(b), b) for b in gone)
    return sorted(again.values(), key=table.place.__getitem__), lengthened, passes_through


def _fits_between(view: RunsView, first: int, last: int, nbytes: int) -> bool:
    return nbytes == 0 or int(view.bytes[first:last].max()) + nbytes <= view.target


def evict(runs: Runs, eviction: Eviction) -> None:
    """Make the move; what it makes needless goes too."""
    table = runs.table
    for remat in eviction.again:
        if table.key(eviction.slot, remat) not in runs.readers:
            runs.insert(eviction.slot, remat)
    for slot, remat in eviction.instead:
        _take_out(runs, table.key(slot, remat))


def _take_out(runs: Runs, key: int) -> None:
    """Remove a run and, with it, every run that brings back what nobody reads any more."""
    table = runs.table
    todo = [key]
    first = True
    while todo:
        key = todo.pop()
        if key not in runs.readers or key % runs.width == runs.width - 1:
            continue
        if not first and runs.readers[key]:
            continue
        first = False
        sources = [runs.latest(read, key) for read in table.op(key).reads]
        runs.remove(key // runs.width, table.remat(key))
        todo += sources


def copies(runs: Runs) -> list[Block]:
    """Blocks made by recompute runs, in the order of the schedule."""
    return [
        block
        for slot in sorted(runs.slot_runs)
        for key in runs.slot_runs[slot]
        for block in runs.held[key].values()
        if block.start == key
    ]


def merge_seconds(runs: Runs, block: Block) -> float:
    """What merging `block` saves at least: the runs that hold it."""
    width = runs.width
    return sum(runs.table.op(key).seconds for key in block.holders if key % width != width - 1)


def may_merge(runs: Runs, view: RunsView, block: Block) -> bool:
    """Whether the bytes of the original fit in the gap that the copy `block` closes (an estimate)."""
    rank = runs.table.rank(block.start)
    previous = runs.held[runs.latest(rank, block.start)].get(block.storage)
    if previous is None:
        return False
    first, slot = previous.end // runs.width + 1, block.start // runs.width
    if first >= slot:
        return True
    return int(view.bytes[first:slot].max()) + block.nbytes <= view.target


def merge(runs: Runs, block: Block) -> None:
    """Take out the runs that hold the copy: their readers go back to the block before it."""
    width = runs.width
    for key in sorted((k for k in block.holders if k % width != width - 1), reverse=True):
        if key in runs.readers:
            _take_out(runs, key)
