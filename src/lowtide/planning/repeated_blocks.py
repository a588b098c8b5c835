"""Equal blocks of a step, a shorter step with few of them, and its schedules spread over all blocks.

    forward   E [b b b b b b b b b b] H        E: embedding, H: head, b: equal blocks
    shorter   E [b b b b b b b] H              the blocks in the middle are left out

- `find_repeats`: equal ops that repeat layer by layer. Two ops are equal where op, sizes, costs and the
  distances of their reads are equal; names do not count. The blocks are consecutive ranges of equal length in
  the forward pass, and such ranges in the opposite order in the backward pass.
- `representative`: the step without the blocks in the middle; the neighbours of the gap read each other. The
  best choice for one block is the best for its copies, except for a remainder of the budget.
- `Spread`: the schedules of the shorter step in the whole one. All tiles of blocks do the
  same. For a budget between two schedules, some blocks follow the one and the others follow the other. Only
  schedules on the lower convex hull are mixed.

The shorter step only gives starts for the search: the simulator counts the bytes and seconds of all blocks.

Shortcoming: blocks whose ops are interleaved with others, or that have another order in the backward pass,
are not found.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lowtide.facts import Node, Region, Remat, Step
from lowtide.planning.search.problem import Figures, Ints
from lowtide.planning.search.step_problem import StepProblem
from lowtide.planning.search.table import RematSet, Rerun, Table

WINDOW = 8
"""Equal ops in a row that suggest a repeated block."""
NUM_LENGTHS = 6
"""Block lengths that are tried, the likeliest first."""
LEAST_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Equal blocks in a row: `count` ranges of `length` ranks, from `start` on."""

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
    """Equal blocks: their ranks in the forward pass, and in the backward pass."""

    forward: BlockRun
    backward: BlockRun


def find_repeats(step: Step) -> list[Repeat]:
    """All runs of equal blocks, without those that overlap with longer ones."""
    first = step.first_backward_rank
    last = next((n.rank for n in step.nodes if n.region is Region.OPTIMIZER), len(step.nodes))
    ops = _Ops(step)
    forwards = [s for p in ops.lengths(0, first) for s in ops.block_runs(0, first, p, (p, p))]
    found: list[Repeat] = []
    for forward in sorted(forwards, key=lambda s: (s.start - s.end, s.start)):
        if all(forward.end <= other.forward.start or other.forward.end <= forward.start for other in found):
            backwards = [
                run
                for q in ops.lengths(first, last)
                for run in ops.block_runs(first, last, q, (-forward.length, q))
                if any(u in forward for r in range(run.start, run.end) for u in step.nodes[r].reads)
            ]
            if backwards:
                longest = max(backwards, key=lambda s: (s.end - s.start, -s.start))
                found.append(Repeat(forward, longest))
    return sorted(found, key=lambda repeat: repeat.forward.start)


class _Ops:
    """The ops of a step by kind: equal kinds do and cost the same."""

    def __init__(self, step: Step) -> None:
        self._nodes, self._border = step.nodes, step.first_backward_rank
        numbers: dict[object, int] = {}
        made = [(storage.nbytes, storage.static, storage.pinned) for storage in step.storages]
        self._kinds = np.array([numbers.setdefault(_kind(n, made), len(numbers)) for n in step.nodes])
        self._given = [not n.reads and all(step.storages[s].static for s in n.holds) for n in step.nodes]

    def lengths(self, start: int, end: int) -> list[int]:
        """The most frequent distances between equal ops."""
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

    def block_runs(self, start: int, end: int, length: int, shifts: tuple[int, int]) -> list[BlockRun]:
        """Runs of blocks of `length` ranks; `shifts`: the distances of their forward and backward reads."""
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
            self._alike(remat.reads, same.reads, shifts)
            for remat, same in zip(mine.remats, other.remats, strict=True)
        )

    def _alike(self, reads: tuple[int, ...], others: tuple[int, ...], shifts: tuple[int, int]) -> bool:
        """Whether two ops read equal values of their blocks, the same value, or parameters of equal size."""
        return all(
            other - read == shifts[read >= self._border]
            or other == read
            or (self._given[read] and self._given[other] and self._kinds[read] == self._kinds[other])
            for read, other in zip(reads, others, strict=True)
        )


def _kind(node: Node, made: list[tuple[int, bool, bool]]) -> tuple[object, ...]:
    """The op, sizes and costs of a node and of its remats."""

    def figures_of(one: Node | Remat) -> tuple[object, ...]:
        sizes = tuple([made[s] for s in one.makes])
        return len(one.reads), len(one.holds), sizes, one.seconds, one.workspace_bytes

    remats = [(remat.rule, figures_of(remat)) for remat in node.remats]
    return node.op, node.region, node.segment, node.on_demand, figures_of(node), *remats


def _runs_of(same: NDArray[np.bool_], least: int) -> list[tuple[int, int]]:
    """Ranges of at least `least` true places in a row."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], same, [False]))))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True) if b - a >= least]


Some = TypeVar("Some", Node, Remat)

TILE = 4
"""Blocks that are repeated together: some can be recomputed from values that others retain."""
HEAD, TAIL = 1, 2
"""Blocks before and after the tile, which can differ from it at the ends of the run."""
MOST = 0.18
"""The largest share of the nodes at which a shorter step is worth its search."""


@dataclass(frozen=True, slots=True)
class BlockGap:
    """The blocks that are left out: `tiles` tiles, from ranks `forward` and `backward` on."""

    repeat: Repeat
    tiles: int
    forward: int
    backward: int

    @property
    def steps(self) -> tuple[int, int]:
        """The ranks of one tile in the forward and in the backward pass."""
        return TILE * self.repeat.forward.length, TILE * self.repeat.backward.length

    @property
    def ends(self) -> tuple[int, int]:
        one, two = self.steps
        return self.forward + self.tiles * one, self.backward + self.tiles * two

    def has(self, rank: int) -> bool:
        one, two = self.ends
        return self.forward <= rank < one or self.backward <= rank < two

    def moved(self, rank: int, reader: int) -> int | None:
        """The rank that a reader reads instead of a left-out `rank`: the equal op of the nearest block on the
        reader's side. None for readers outside of all blocks."""
        repeat = self.repeat
        if reader not in repeat.forward and reader not in repeat.backward:
            return None
        one, two = self.ends
        if rank >= self.backward:
            return rank - (two - self.backward)
        is_before = reader < self.forward or reader >= two
        return rank + (one - self.forward) * (1 if is_before else -1)


class Representative:
    """The shorter step, and how to spread its remats over the whole one."""

    def __init__(self, whole: Step, gaps: list[BlockGap], ranks: list[int]) -> None:
        self._gaps, self._ranks = gaps, ranks
        self.step = _shortened(whole, gaps, ranks)

    @property
    def most_blocks(self) -> int:
        """The most blocks that are left out in a row."""
        return TILE * max(gap.tiles for gap in self._gaps)

    def spread(self, plan: RematSet, short: Table, whole: Table) -> list[list[Rerun]]:
        """A set of remats of the shorter step in the whole one, in parts: first the remats outside of the
        blocks that are left out, then those of each such block, from the last of a row to the first."""
        parts: list[list[Rerun]] = [[] for _ in range(1 + self.most_blocks)]
        for slot, number in sorted(plan):
            rank = short.remats[number].rank
            place = short.again[rank].index(number)
            for part, where, what in self._copies(self._ranks[slot], self._ranks[rank]):
                if where >= whole.first_backward and whole.may_run(what, where):
                    parts[part].append((where, whole.again[what][place]))
        return parts

    def _copies(self, slot: int, rank: int) -> Iterator[tuple[int, int, int]]:
        """(part, slot, rank) of all runs in the whole step for one run in the shorter step."""
        yield 0, slot, rank
        for gap in self._gaps:
            one, two = gap.steps
            if gap.forward - one <= rank < gap.forward:
                block = (rank + one - gap.forward) // gap.repeat.forward.length
                for tile in range(gap.tiles):
                    part = (TILE * (gap.tiles - tile) - 1 - block) * self.most_blocks // (TILE * gap.tiles)
                    earlier = slot - (tile + 1) * two if slot in gap.repeat.backward else slot
                    yield 1 + part, earlier, rank + (tile + 1) * one


def representative(step: Step) -> Representative | None:
    """A shorter step for one with many equal blocks; None where it would not be much shorter."""
    gaps = [gap for repeat in find_repeats(step) if (gap := _gap(step, repeat)) is not None]
    ranks = _kept_ranks(step, gaps)
    num_nodes = sum(node.region is not Region.OPTIMIZER for node in step.nodes)
    return Representative(step, gaps, ranks) if gaps and len(ranks) <= MOST * num_nodes else None


def _gap(step: Step, repeat: Repeat) -> BlockGap | None:
    """The largest gap in a row of blocks. The backward part of the gap begins where its forward values are
    first read."""
    forward, backward = repeat.forward, repeat.backward
    begin = forward.start + (HEAD + TILE) * forward.length
    for tiles in range((min(forward.count, backward.count) - HEAD - TILE - TAIL) // TILE, 0, -1):
        end = begin + tiles * TILE * forward.length
        reading = (
            rank
            for rank in range(backward.start, backward.end)
            if any(begin <= read < end for read in step.nodes[rank].reads)
        )
        found = BlockGap(repeat, tiles, begin, next(reading, backward.end))
        if found.ends[1] <= backward.end:
            return found
    return None


def _kept_ranks(step: Step, gaps: list[BlockGap]) -> list[int]:
    """All ranks but the blocks that are left out, their parameters, and the optimizer."""
    kept = [
        node
        for node in step.nodes
        if node.region is not Region.OPTIMIZER and not any(gap.has(node.rank) for gap in gaps)
    ]
    read = {read for node in kept for read in node.reads}
    return [
        node.rank
        for node in kept
        if node.reads or node.rank in read or not all(step.storages[s].static for s in node.holds)
    ]


def _shortened(step: Step, gaps: list[BlockGap], ranks: list[int]) -> Step:
    new = {rank: i for i, rank in enumerate(ranks)}
    maker = {s: (node.rank, i) for node in step.nodes for i, s in enumerate(node.makes)}
    storages: dict[int, int] = {}

    def rank_for(rank: int, reader: int) -> int | None:
        """The rank of the whole step that a kept reader reads instead of `rank`."""
        if rank in new:
            return rank
        gap = next((gap for gap in gaps if gap.has(rank)), None)
        found = None if gap is None else gap.moved(rank, reader)
        if found is None or found not in new:
            return None
        # a read across many blocks can end at any op
        return found if len(step.nodes[found].makes) == len(step.nodes[rank].makes) else None

    def storage_for(storage: int, reader: int) -> int | None:
        made, place = maker.get(storage, (-1, 0))
        rank = rank_for(made, reader) if made >= 0 else None
        if rank is None:
            return None
        like = step.nodes[rank].makes[place]
        return storages.setdefault(like, len(storages))

    holds: list[tuple[int, ...]] = []

    def short(one: Some, reader: int) -> Some:
        reads = tuple(new[u] for read in one.reads if (u := rank_for(read, reader)) is not None)
        makes = tuple(s for made in one.makes if (s := storage_for(made, reader)) is not None)
        there = {s for read in reads for s in holds[read]}.union(makes)
        kept = tuple(s for old in one.holds if (s := storage_for(old, reader)) in there)
        return replace(one, reads=reads, makes=makes, holds=kept)

    nodes: list[Node] = []
    for i, rank in enumerate(ranks):
        nodes.append(replace(short(step.nodes[rank], rank), rank=i, eager_reads=()))
        holds.append(nodes[-1].holds)
    for i, rank in enumerate(ranks):  # remats may read later nodes
        if nodes[i].remats:
            nodes[i] = replace(nodes[i], remats=tuple(short(remat, rank) for remat in nodes[i].remats))
    made = sorted(storages, key=storages.__getitem__)
    return replace(
        step,
        nodes=tuple(nodes),
        storages=tuple(replace(step.storages[s], id=i) for i, s in enumerate(made)),
        graphs=(),
        optimizer_chunks=(),
    )


Parts = list[list[Rerun]]

NUM_TRIES = 4
"""Mixtures of two schedules that are tried for a budget."""


class Point(NamedTuple):
    """A schedule that was spread over all blocks, with its figures in the whole step."""

    figures: Figures
    parts: Parts
    order: Ints

    @property
    def peak_bytes(self) -> int:
        return self.figures.peak_bytes

    @property
    def seconds(self) -> float:
        return self.figures.seconds


class Spread:
    """The schedules of one shorter step in the whole one. `num_ops` are the ops to search for, without the
    copies of blocks."""

    def __init__(
        self, found: Representative, short: StepProblem, whole: StepProblem, orders: Iterable[Ints]
    ) -> None:
        self._whole = whole
        self.num_ops = len(short.problem.seconds)
        self._mixed: dict[int, Point | None] = {}
        self._all = [found.spread(short.remat_set(order), short.table, whole.table) for order in orders]

    @cached_property
    def points(self) -> list[Point]:
        """All schedules, by their peaks."""
        return sorted((self._point(parts) for parts in self._all), key=lambda p: (p.peak_bytes, p.seconds))

    def mixed(self, budget_bytes: int) -> Point | None:
        """The mixture of the two schedules around a budget that uses the budget up."""
        if budget_bytes not in self._mixed:
            below = [point for point in self._best if point.peak_bytes <= budget_bytes]
            above = [point for point in self._best if point.peak_bytes > budget_bytes]
            if below and above:
                self._mixed[budget_bytes] = self._mixture(below[-1], above[0], budget_bytes)
            else:
                self._mixed[budget_bytes] = below[-1] if below else None
        return self._mixed[budget_bytes]

    def _mixture(self, below: Point, above: Point, budget_bytes: int) -> Point:
        found = below
        low, high, most = 0, len(above.parts) - 1, above.peak_bytes
        for _ in range(NUM_TRIES):
            # bytes grow about evenly from block to block
            share = (budget_bytes - found.peak_bytes) / (most - found.peak_bytes)
            middle = low + int((high - low) * share)
            if middle == low:
                break
            point = self._point([below.parts[0], *above.parts[1 : 1 + middle], *below.parts[1 + middle :]])
            if point.peak_bytes <= budget_bytes:
                low, found = middle, point
            else:
                high, most = middle, point.peak_bytes
        return found

    @cached_property
    def _best(self) -> list[Point]:
        """The lower convex hull: schedules that no mixture of two others beats."""
        found: list[Point] = []
        for point in self.points:
            if found and point.seconds >= found[-1].seconds:
                continue
            while len(found) > 1 and _slope(found[-2], found[-1]) >= _slope(found[-1], point):
                found.pop()
            found.append(point)
        return found

    def _point(self, parts: Parts) -> Point:
        order = self._whole.sequence({run for part in parts for run in part})
        return Point(self._whole.problem.evaluate(order, 0), parts, order)


def _slope(one: Point, two: Point) -> float:
    """Seconds for each byte: negative, since more bytes take fewer seconds."""
    return (two.seconds - one.seconds) / max(1, two.peak_bytes - one.peak_bytes)
