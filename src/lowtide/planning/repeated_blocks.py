"""Equal blocks of a step: where the same ops follow each other again and again, layer by layer.

Ops are equal by what they are, make and cost, and by where what they read stands from them; names do not
count. Blocks of a model are ranges of equal length in a row in the forward pass, and such ranges in the
backward pass, in the opposite order.

Shortcoming: blocks whose ops are interleaved with others, or that stand in another order in the backward
pass, are not found.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.facts import Node, Region, Remat, Step

WINDOW = 8
"""Ops in a row that are equal where a block may begin again."""
NUM_LENGTHS = 6
"""Lengths of blocks that are tried, the likeliest first."""
LEAST_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Equal ranges of ranks in a row: `count` times `length`, from `start` on."""

    start: int
    length: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.length * self.count

    def __contains__(self, rank: int) -> bool:
        return self.start <= rank < self.end


@dataclass(frozen=True, slots=True)
class Repeat:
    """Equal blocks: their ranges in the forward pass, and in the backward pass."""

    forward: BlockRun
    backward: BlockRun


def find_repeats(step: Step) -> list[Repeat]:
    """All equal blocks in a row, without those that overlap with longer ones."""
    first = step.first_backward_rank
    last = next((n.rank for n in step.nodes if n.region is Region.OPTIMIZER), len(step.nodes))
    ops = _Ops(step)
    forwards = [s for p in ops.lengths(0, first) for s in ops.stretches(0, first, p, (p, p))]
    found: list[Repeat] = []
    for forward in sorted(forwards, key=lambda s: (s.start - s.end, s.start)):
        if all(forward.end <= other.forward.start or other.forward.end <= forward.start for other in found):
            backwards = [
                stretch
                for q in ops.lengths(first, last)
                for stretch in ops.stretches(first, last, q, (-forward.length, q))
                if any(u in forward for r in range(stretch.start, stretch.end) for u in step.nodes[r].reads)
            ]
            if backwards:
                longest = max(backwards, key=lambda s: (s.end - s.start, -s.start))
                found.append(Repeat(forward, longest))
    return sorted(found, key=lambda repeat: repeat.forward.start)


class _Ops:
    """The ops of a step, told apart by what they do."""

    def __init__(self, step: Step) -> None:
        self._nodes, self._border = step.nodes, step.first_backward_rank
        numbers: dict[object, int] = {}
        made = [(storage.nbytes, storage.static, storage.pinned) for storage in step.storages]
        self._kinds = np.array([numbers.setdefault(_kind(n, made), len(numbers)) for n in step.nodes])
        self._given = [not n.reads and all(step.storages[s].static for s in n.holds) for n in step.nodes]

    def lengths(self, start: int, end: int) -> list[int]:
        """How far from each other equal ops stand most often."""
        kinds = self._kinds[start:end].tolist()
        seen: dict[tuple[int, ...], int] = {}
        votes: Counter[int] = Counter()
        for i in range(len(kinds) - WINDOW + 1):
            window = tuple(kinds[i : i + WINDOW])
            if window in seen:
                votes[i - seen[window]] += 1
            seen[window] = i
        likely = sorted(votes, key=lambda length: (-votes[length], length))[:NUM_LENGTHS]
        return [length for length in likely if votes[length] > length]

    def stretches(self, start: int, end: int, length: int, shifts: tuple[int, int]) -> list[BlockRun]:
        """Where ops are equal to those `length` ranks later, whose reads in the forward and the backward pass
        stand by `shifts` from theirs."""
        kinds = self._kinds[start:end]
        same = kinds[:-length] == kinds[length:]
        for low, high in _runs_of(same, (LEAST_BLOCKS - 1) * length):
            for i in range(low, high):
                same[i] = self._read_alike(start + i, start + i + length, shifts)
        return [
            BlockRun(start + low, length, (high - low) // length + 1)
            for low, high in _runs_of(same, (LEAST_BLOCKS - 1) * length)
        ]

    def _read_alike(self, one: int, two: int, shifts: tuple[int, int]) -> bool:
        mine, other = self._nodes[one], self._nodes[two]
        return self._alike(mine.reads, other.reads, shifts) and all(
            self._alike(way.reads, same.reads, shifts)
            for way, same in zip(mine.remats, other.remats, strict=True)
        )

    def _alike(self, reads: tuple[int, ...], others: tuple[int, ...], shifts: tuple[int, int]) -> bool:
        """Whether two ops read values of their own blocks, the same value, or parameters of equal size."""
        return all(
            other - read == shifts[read >= self._border]
            or other == read
            or (self._given[read] and self._given[other] and self._kinds[read] == self._kinds[other])
            for read, other in zip(reads, others, strict=True)
        )


def _kind(node: Node, made: list[tuple[int, bool, bool]]) -> tuple[object, ...]:
    """What an op does and costs."""

    def told(one: Node | Remat) -> tuple[object, ...]:
        sizes = tuple([made[s] for s in one.makes])
        return len(one.reads), len(one.holds), sizes, one.seconds, one.workspace_bytes

    ways = [(remat.rule, told(remat)) for remat in node.remats]
    return node.op, node.region, node.segment, node.on_demand, told(node), *ways


def _runs_of(same: NDArray[np.bool_], least: int) -> list[tuple[int, int]]:
    """Ranges of at least so many places in a row that are true."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], same, [False]))))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True) if b - a >= least]
