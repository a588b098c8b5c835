"""torch's caching allocator for accelerators, simulated: the bytes that it reserves while a process trains.

The allocator rounds a request to 512 bytes and cuts a block from a segment:

    request          segment
    up to 1 MiB      2 MiB
    up to 10 MiB     20 MiB
    larger           as large as the request, rounded to 2 MiB

A request takes the smallest free block that is large enough. The rest of the block becomes a free block,
except where the rest of a large block is at most 1 MiB. Free neighbours are joined. The device never gets a
segment back.

With `expandable_segments`, there is one segment for small requests and one for large ones. A request that no
free block can take makes its segment longer, by pages of 2 MiB and of 20 MiB; a free block at the end is part
of the new room. Every rest becomes a free block. The block at the end is taken last.

The process: static storages first, in their order; then steps, until no step reserves more. The first step
makes the optimizer's state inside of the optimizer's step, and the workspaces that libraries keep.

Of temporaries inside of an op only the sum is known. Two processes are simulated: with one block for all of
them, and with blocks as large as the op's results. They are the two ends of a range.

Shortcomings: one stream; no garbage collection of segments; no other option of `PYTORCH_ALLOC_CONF`. Other
tensors of the process are unknown.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import NamedTuple

from lowtide.facts import Kind, Region, Step, Storage
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


def caches_blocks(device: str) -> bool:
    """Whether torch's caching allocator cuts a device's memory into blocks, by these rules."""
    return device.partition(":")[0] not in ("cpu", "mps", "meta")


def expandable_segments(environment: Mapping[str, str]) -> bool:
    """Whether the environment asks for expandable segments: `PYTORCH_ALLOC_CONF=expandable_segments:True`."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    text = next((environment[name] for name in names if environment.get(name)), "")
    options = dict(option.partition(":")[::2] for option in text.replace(" ", "").split(","))
    return options.get("expandable_segments") == "True"


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

    def __init__(self, *, expandable: bool = False) -> None:
        self.allocated_bytes = self.peak_allocated_bytes = self.reserved_bytes = 0
        self.expandable = expandable
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._by_number: dict[int, _Block] = {}
        self._end: dict[bool, _Block] = {}

    def allocate(self, nbytes: int) -> _Block | None:
        """A block for a request; None for a request of 0 bytes."""
        size = rounded(nbytes)
        if not size:
            return None
        is_small = size <= SMALL_BYTES
        block = self._best_fit(size, is_small=is_small)
        if block is None:
            block = self._more_room(size, is_small=is_small)
        left = block.nbytes - size
        if left >= ROUND_BYTES if is_small or self.expandable else left > SMALL_BYTES:
            self._cut(block, size)
        block.free = False
        self.allocated_bytes += block.nbytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def _best_fit(self, size: int, *, is_small: bool) -> _Block | None:
        free = self._free[is_small]
        place = bisect_left(free, (size, 0))
        if place == len(free):
            return None
        end = self._end.get(is_small)
        # the block at the end can grow: others come first
        if end is not None and free[place][1] == end.number and place + 1 < len(free):
            place += 1
        return self._by_number[free.pop(place)[1]]

    def release(self, block: _Block | None) -> None:
        if block is None:
            return
        self.allocated_bytes -= block.nbytes
        before, after = block.before, block.after
        if after is not None and after.free:
            self._forget(after)
            self._join(block, after)
        if before is not None and before.free:
            self._forget(before)
            self._join(before, block)
            block = before
        self._offer(block)

    def _join(self, first: _Block, second: _Block) -> None:
        first.nbytes += second.nbytes
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        elif self._end.get(first.is_small) is second:
            self._end[first.is_small] = first

    def _more_room(self, size: int, *, is_small: bool) -> _Block:
        """A block of a new segment, or at the end of the segment that grows."""
        nbytes = SMALL_SEGMENT_BYTES
        if not is_small:
            whole = -(-size // SEGMENT_ROUND_BYTES) * SEGMENT_ROUND_BYTES
            nbytes = LARGE_SEGMENT_BYTES if size < LARGE_BYTES else whole
        if not self.expandable:
            self.reserved_bytes += nbytes
            return self._new_block(nbytes, is_small=is_small)
        page = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        end = self._end.get(is_small)
        missing = nbytes - (end.nbytes if end is not None and end.free else 0)
        more = -(-missing // page) * page
        self.reserved_bytes += more
        if end is not None and end.free:
            self._forget(end)
            end.nbytes += more
            return end
        block = self._new_block(more, is_small=is_small)
        if end is not None:
            block.before, end.after = end, block
        self._end[is_small] = block
        return block

    def _new_block(self, nbytes: int, *, is_small: bool) -> _Block:
        block = _Block(nbytes, is_small, len(self._by_number))
        self._by_number[block.number] = block
        return block

    def _cut(self, block: _Block, size: int) -> None:
        rest = self._new_block(block.nbytes - size, is_small=block.is_small)
        rest.before, rest.after, block.after = block, block.after, rest
        if rest.after is not None:
            rest.after.before = rest
        elif self._end.get(block.is_small) is block:
            self._end[block.is_small] = rest
        block.nbytes = size
        self._offer(rest)

    def _offer(self, block: _Block) -> None:
        block.free = True
        insort(self._free[block.is_small], (block.nbytes, block.number))

    def _forget(self, block: _Block) -> None:
        free = self._free[block.is_small]
        free.pop(bisect_left(free, (block.nbytes, block.number)))


class Reserved(NamedTuple):
    """The largest sum of blocks in use at one time point of a process, and the sum of all segments: at least
    and at most, since the blocks of temporaries inside of ops are not known one by one."""

    allocated_bytes: int
    least_bytes: int
    reserved_bytes: int


MOST_STEPS = 4
"""By then, blocks of one step take the places of the last one's."""


def reserved_for(step: Step, timeline: Timeline, *, expandable: bool = False) -> Reserved:
    """The bytes of the allocator in a process that trains by a schedule of `step`."""
    whole, parts = (
        _process(step, timeline, [temporaries(*at) for at in _workspaces(step, timeline)], expandable)
        for temporaries in (_in_one_block, _in_blocks_of_results)
    )
    found = sorted((whole.reserved_bytes, parts.reserved_bytes))
    return Reserved(whole.peak_allocated_bytes, *found)


Sizes = tuple[int, ...]


def _workspaces(step: Step, timeline: Timeline) -> Iterator[tuple[int, Sizes]]:
    """For each run, the bytes of its temporaries, and the sizes of its results: for the optimizer's step, of
    the parameters."""
    made: list[list[int]] = [[] for _ in timeline.runs]
    for storage, start, _ in timeline.blocks:
        made[start].append(step.storages[storage].nbytes)
    parameters = tuple(s.nbytes for s in step.storages if s.kind is Kind.PARAMETER)
    for run, nbytes, results in zip(timeline.runs, timeline.workspace_bytes, made, strict=True):
        is_optimizer = step.nodes[run.rank].region is Region.OPTIMIZER
        yield nbytes, parameters if is_optimizer else (max(results, default=0),)


def _in_one_block(nbytes: int, _sizes: Sizes) -> Sizes:
    return (nbytes,)


def _in_blocks_of_results(nbytes: int, sizes: Sizes) -> Sizes:
    """As many blocks as large as the results as there is room for, and the rest."""
    sizes = tuple(size for size in sizes if size)
    if nbytes <= 0 or not sizes:
        return (nbytes,)
    found: list[int] = []
    for size in cycle(sizes):
        if nbytes < size:
            break
        found.append(size)
        nbytes -= size
    return (*found, nbytes)


def _process(step: Step, timeline: Timeline, temporaries: Sequence[Sizes], expandable: bool) -> Allocator:
    allocator = Allocator(expandable=expandable)
    late = [s for s in step.storages if s.static and _made_in_first_step(s)]
    for storage in step.storages:
        if storage.static and not _made_in_first_step(storage):
            allocator.allocate(storage.nbytes)
    reserved = -1
    for _ in range(MOST_STEPS):
        _run(step, timeline, temporaries, allocator, late)
        if allocator.reserved_bytes == reserved and not late:
            break
        late, reserved = [], allocator.reserved_bytes
    return allocator


def _made_in_first_step(storage: Storage) -> bool:
    return storage.kind is Kind.OPTIMIZER_STATE


def _run(
    step: Step,
    timeline: Timeline,
    temporaries: Sequence[Sizes],
    allocator: Allocator,
    late: Sequence[Storage],
) -> None:
    """One step; `late` are storages that the optimizer's step makes, once."""
    starts: list[list[int]] = [[] for _ in timeline.runs]
    ends: list[list[int]] = [[] for _ in timeline.runs]
    for number, (_, start, end) in enumerate(timeline.blocks):
        starts[start].append(number)
        ends[end].append(number)
    live: dict[int, _Block | None] = {}
    waiting = list(late)
    for position, run in enumerate(timeline.runs):
        if waiting and step.nodes[run.rank].region is Region.OPTIMIZER:
            for storage in waiting:
                allocator.allocate(storage.nbytes)
            waiting = []
        if timeline.workspace_bytes[position] < 0:  # the op writes its result over its input
            _release_all(allocator, live, [number for number in ends[position] if number in live])
        for number in starts[position]:
            live[number] = allocator.allocate(step.storages[timeline.blocks[number][0]].nbytes)
        inside = [allocator.allocate(max(0, nbytes)) for nbytes in temporaries[position]]
        for block in inside:
            allocator.release(block)
        _release_all(allocator, live, [number for number in ends[position] if number in live])
    for storage in waiting:
        allocator.allocate(storage.nbytes)
    _release_all(allocator, live, sorted(live))


def _release_all(allocator: Allocator, live: dict[int, "_Block | None"], numbers: Sequence[int]) -> None:
    for number in numbers:
        allocator.release(live.pop(number))
