"""torch's caching allocator for GPUs, simulated: the bytes that it reserves for the blocks of a schedule.

The allocator rounds a request to 512 bytes and cuts a block from a segment:

    request          segment
    up to 1 MiB      2 MiB
    up to 10 MiB     20 MiB
    larger           as large as the request, rounded to 2 MiB

A request takes the smallest free block that is large enough. The rest of the block becomes a free block,
except where the rest of a large block is at most 1 MiB. Free neighbours are joined. The device never gets a
segment back.

Shortcomings: one stream, no garbage collection of segments, no `expandable_segments`. The allocations of the
process before the step are unknown. So the reserved bytes are the upper end of a range.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lowtide.facts import Step, Storage
from lowtide.planning.simulate import Timeline

MIB = 1 << 20
ROUND_BYTES = 512
SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_BYTES = 10 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
SEGMENT_ROUND_BYTES = 2 * MIB


def rounded(nbytes: int) -> int:
    """The bytes of the block for a request; 0 for a request of 0 bytes."""
    return -(-nbytes // ROUND_BYTES) * ROUND_BYTES


def cut_by_allocator(step: Step) -> Step:
    """The same step with storages as large as the blocks of the allocator."""
    return replace(step, storages=tuple(map(_cut, step.storages)))


def _cut(storage: Storage) -> Storage:
    nbytes = rounded(storage.nbytes)
    eager = rounded(storage.nbytes + storage.extra_eager_bytes)
    return replace(storage, nbytes=nbytes, extra_eager_bytes=eager - nbytes)


@dataclass(slots=True, eq=False)
class _Block:
    nbytes: int
    is_small: bool
    number: int
    free: bool = False
    before: "_Block | None" = None
    after: "_Block | None" = None


class Allocator:
    """Blocks in use and free blocks; `reserved_bytes` never shrink."""

    def __init__(self) -> None:
        self.allocated_bytes = self.peak_allocated_bytes = self.reserved_bytes = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._by_number: dict[int, _Block] = {}

    def allocate(self, nbytes: int) -> _Block | None:
        """A block for a request; None for a request of 0 bytes."""
        size = rounded(nbytes)
        if not size:
            return None
        is_small = size <= SMALL_BYTES
        free = self._free[is_small]
        place = bisect_left(free, (size, 0))
        if place < len(free):
            block = self._by_number[free.pop(place)[1]]
        else:
            block = self._new_segment(size, is_small=is_small)
        left = block.nbytes - size
        if (is_small and left >= ROUND_BYTES) or (not is_small and left > SMALL_BYTES):
            self._cut(block, size)
        block.free = False
        self.allocated_bytes += block.nbytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def release(self, block: _Block | None) -> None:
        if block is None:
            return
        self.allocated_bytes -= block.nbytes
        before, after = block.before, block.after
        if after is not None and after.free:
            self._forget(after)
            block.nbytes += after.nbytes
            block.after = after.after
            if after.after is not None:
                after.after.before = block
        if before is not None and before.free:
            self._forget(before)
            before.nbytes += block.nbytes
            before.after = block.after
            if block.after is not None:
                block.after.before = before
            block = before
        self._offer(block)

    def _new_segment(self, size: int, *, is_small: bool) -> _Block:
        nbytes = SMALL_SEGMENT_BYTES
        if not is_small:
            whole = -(-size // SEGMENT_ROUND_BYTES) * SEGMENT_ROUND_BYTES
            nbytes = LARGE_SEGMENT_BYTES if size < LARGE_BYTES else whole
        self.reserved_bytes += nbytes
        return self._new_block(nbytes, is_small=is_small)

    def _new_block(self, nbytes: int, *, is_small: bool) -> _Block:
        block = _Block(nbytes, is_small, len(self._by_number))
        self._by_number[block.number] = block
        return block

    def _cut(self, block: _Block, size: int) -> None:
        rest = self._new_block(block.nbytes - size, is_small=block.is_small)
        rest.before, rest.after, block.after = block, block.after, rest
        if rest.after is not None:
            rest.after.before = rest
        block.nbytes = size
        self._offer(rest)

    def _offer(self, block: _Block) -> None:
        block.free = True
        insort(self._free[block.is_small], (block.nbytes, block.number))

    def _forget(self, block: _Block) -> None:
        free = self._free[block.is_small]
        free.pop(bisect_left(free, (block.nbytes, block.number)))


class Reserved(NamedTuple):
    """The largest sum of blocks in use at one time point of a schedule, and the sum of all segments."""

    allocated_bytes: int
    reserved_bytes: int


def reserved_for(step: Step, timeline: Timeline) -> Reserved:
    """The bytes of the allocator under a schedule of `step`; static storages are allocated first."""
    allocator = Allocator()
    for storage in step.storages:
        if storage.static:
            allocator.allocate(storage.nbytes)
    starts: list[list[int]] = [[] for _ in timeline.runs]
    ends: list[list[int]] = [[] for _ in timeline.runs]
    for number, (_, start, end) in enumerate(timeline.blocks):
        starts[start].append(number)
        ends[end].append(number)
    live: dict[int, _Block | None] = {}
    for position in range(len(timeline.runs)):
        workspace_bytes = timeline.workspace_bytes[position]
        freed = [number for number in ends[position] if number in live]
        if workspace_bytes < 0:  # the op writes its result over its input
            _release_all(allocator, live, freed)
        for number in starts[position]:
            live[number] = allocator.allocate(step.storages[timeline.blocks[number][0]].nbytes)
        allocator.release(allocator.allocate(max(0, workspace_bytes)))
        _release_all(allocator, live, [number for number in ends[position] if number in live])
    return Reserved(allocator.peak_allocated_bytes, allocator.reserved_bytes)


def _release_all(allocator: Allocator, live: dict[int, "_Block | None"], numbers: Sequence[int]) -> None:
    for number in numbers:
        allocator.release(live.pop(number))
