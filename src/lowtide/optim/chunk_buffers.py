"""When the chunks of a step with resting state read, compute and write, and the bytes of their blocks.

    read      [1][2]   [3]
    compute      [1]  [2]  [3]
    write             [1]  [2]  [3]

A block lives from the start of its read to the end of its write. So three chunks have blocks at most: while
one is computed, the next is read and the one before is written. Where three do not fit into the limit, a
chunk waits for the write before, and then for its own read. Bytes depend on sizes alone, not on the speed of
the store.
"""

from collections.abc import Sequence
from typing import NamedTuple

CHUNKS_AT_ONCE = 3


class ChunkTurn(NamedTuple):
    """How one chunk is computed: whether the write of the one before has to end first, whether the next is
    read meanwhile, and the bytes of all blocks that are live."""

    waits_for_write: bool
    reads_next: bool
    live_bytes: int


def limit_bytes(block_bytes: Sequence[int], chunk_bytes: Sequence[int], *, size: int) -> int:
    """Bytes of all blocks at once: three of usual chunks, or one of the largest. `chunk_bytes` are those of
    the parameters in each chunk, which are at most `size` in a usual one."""
    usual = [block for block, parameters in zip(block_bytes, chunk_bytes, strict=True) if parameters <= size]
    return max([CHUNKS_AT_ONCE * max(usual, default=0), *block_bytes])


def turns(block_bytes: Sequence[int], *, limit: int) -> list[ChunkTurn]:
    """The turn of each chunk, by the bytes of its blocks."""
    found: list[ChunkTurn] = []
    writing = 0
    for place, own in enumerate(block_bytes):
        following = block_bytes[place + 1] if place + 1 < len(block_bytes) else 0
        reads = following > 0 and own + following <= limit
        waits = writing > 0 and writing + own + (following if reads else 0) > limit
        writing = 0 if waits else writing
        found.append(ChunkTurn(waits, reads, writing + own + (following if reads else 0)))
        writing = own
    return found
