"""A step whose weights rest on a store: they are no longer live all along, but read by fetches.

    weight live          [ placeholder .................. forward ................... backward ......... ]
    weight rests         [ placeholder ] [fetch][mm]                          [fetch again][mm_backward]

`with_resting_weights` is a pure function from a step and some weights to another step, its *resting form*.
Each fetch of the forward pass is a node right before the first reader; a schedule may run it earlier. In
backward a fetch is a remat of that node, so that planners choose between a weight that stays and one that is
read once more. Nothing is written: the store has the values of frozen weights all along, and those of trained
ones after each step of the optimizer.

A weight with uses far apart in the forward pass, as tied embeddings have, gets a fetch and a storage for
each cluster of uses, where reading it again takes no longer than what is in between.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from lowtide.facts import FETCH, Action, Node, Region, Remat, Step, Storage

REST = "rest"
"""The name of the remat rule that reads a resting weight once more."""
WEIGHTS = ("frozen", "parameters")
"""What of `Storage.rests` is a weight."""


def restable_weights(step: Step) -> dict[str, Storage]:
    """The weights that may rest, by their names in `Solution.resting`."""
    return {f"{s.rests}:{s.name}": s for s in step.storages if s.rests in WEIGHTS and s.static}


def with_resting_weights(step: Step, resting: Iterable[str]) -> Step:
    """The step in which the weights `resting` rest on the store: names of `Solution.resting`, those of other
    kinds left out. A weight rests by its name, also where it has become trained or frozen since."""
    names = {name for word, _, name in (text.partition(":") for text in resting) if word in WEIGHTS}
    chosen = [s.id for s in restable_weights(step).values() if s.name in names]
    return _Form(step, chosen).step() if chosen else step


def with_weights_in_memory(storages: Iterable[Storage]) -> Iterator[Storage]:
    """The storages of a resting form as eager has them: each weight once, all along."""
    seen: set[str] = set()
    for storage in storages:
        if storage.rests not in WEIGHTS or storage.static:
            yield storage
        elif storage.name in seen:
            yield replace(storage, nbytes=0)
        else:
            seen.add(storage.name)
            yield replace(storage, static=True)


@dataclass(frozen=True, slots=True)
class _WeightFetch:
    """A fetch of `storage` right before rank `first`; the block of the fetch is storage `block`."""

    storage: int
    segment: int
    placeholder: int
    first: int
    block: int


class _Form:
    """The resting form of `step`, whose static storages `chosen` rest."""

    def __init__(self, step: Step, chosen: Sequence[int]) -> None:
        self._step, self._chosen = step, set(chosen)
        self._inputs = {
            node.rank: storage
            for node in step.nodes[: step.first_backward_rank]
            if node.op == "placeholder"
            for storage in node.holds
            if storage in self._chosen
        }
        """by rank of a placeholder, the weight"""
        self._storages = list(step.storages)
        self._fetches = self._all_fetches()
        self._of_input: dict[int, list[_WeightFetch]] = defaultdict(list)
        for fetch in self._fetches:
            self._of_input[fetch.placeholder].append(fetch)

    def _all_fetches(self) -> list[_WeightFetch]:
        uses, spans = self._uses()
        gaps = _Gaps(self._step, [(storage, ranks[0]) for (storage, _), ranks in uses.items()])
        found: list[_WeightFetch] = []
        begun: set[int] = set()
        for rank, storage in self._inputs.items():
            segment = self._step.nodes[rank].segment
            ranks = uses.get((storage, segment), [])
            for first in _cluster_starts(ranks, spans.get((storage, segment), []), gaps, storage):
                found.append(_WeightFetch(storage, segment, rank, first, self._block(storage, begun)))
        return sorted(found, key=lambda fetch: (fetch.first, fetch.placeholder))

    def _block(self, storage: int, begun: set[int]) -> int:
        """The storage of one fetch: the weight's own for the first one."""
        plain = replace(self._step.storages[storage], static=False)
        if storage not in begun:
            begun.add(storage)
            self._storages[storage] = plain
            return storage
        self._storages.append(replace(plain, id=len(self._storages)))
        return len(self._storages) - 1

    def _uses(self) -> tuple[dict[tuple[int, int], list[int]], dict[tuple[int, int], list[tuple[int, int]]]]:
        """By weight and segment: the forward ranks that read it, and its views, each from its rank to its
        last forward reader."""
        uses: dict[tuple[int, int], list[int]] = defaultdict(list)
        last: dict[int, int] = {}
        nodes = self._step.nodes
        for node in nodes[: self._step.first_backward_rank]:
            for storage in {s for read in node.reads for s in nodes[read].holds if s in self._chosen}:
                uses[storage, node.segment].append(node.rank)
            for read in node.reads:
                last[read] = node.rank
        spans: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for node in nodes[: self._step.first_backward_rank]:
            for storage in node.holds if node.rank not in self._inputs else ():
                if storage in self._chosen:
                    spans[storage, node.segment].append((node.rank, last.get(node.rank, node.rank)))
        return uses, spans

    def step(self) -> Step:
        step = self._step
        fetched = {fetch.storage for fetch in self._fetches}
        for storage in self._chosen - fetched:  # nothing reads it, and it rests all along
            self._storages[storage] = replace(step.storages[storage], static=False)
        before: dict[int, list[_WeightFetch]] = defaultdict(list)
        for fetch in self._fetches:
            before[fetch.first].append(fetch)
        new: list[int] = []
        rank_of_fetch: dict[_WeightFetch, int] = {}
        count = 0
        for node in step.nodes:
            for fetch in before.get(node.rank, ()):
                rank_of_fetch[fetch] = count
                count += 1
            new.append(count)
            count += 1
        nodes: list[Node] = []
        blocks: list[dict[int, int]] = []
        for node in step.nodes:
            nodes += [
                self._fetch_node(fetch, rank_of_fetch[fetch], new) for fetch in before.get(node.rank, ())
            ]
            nodes.append(self._renewed(node, new, rank_of_fetch, blocks))
        return replace(step, nodes=tuple(nodes), storages=tuple(self._storages))

    def _fetch_node(self, fetch: _WeightFetch, rank: int, new: Sequence[int]) -> Node:
        storage = self._step.storages[fetch.storage]
        reads, block = (new[fetch.placeholder],), (fetch.block,)
        same = self._of_input[fetch.placeholder].index(fetch)
        again = Remat(rule=REST, action=Action.OFFLOAD, reads=reads, holds=block, makes=block)
        return Node(
            rank=rank,
            name=f"fetch of {storage.name}" + (f" {same + 1}" if same else ""),
            op=FETCH,
            region=Region.FORWARD,
            kind=storage.kind,
            module=storage.name,
            segment=fetch.segment,
            reads=reads,
            holds=block,
            makes=block,
            remats=(again,),
        )

    def _renewed(
        self,
        node: Node,
        new: Sequence[int],
        rank_of_fetch: Mapping[_WeightFetch, int],
        blocks: list[dict[int, int]],
    ) -> Node:
        """A node of the step with its new ranks; `blocks` gets the block of each weight that it holds."""
        if node.rank in self._inputs:
            weight = self._inputs[node.rank]
            blocks.append({})
            return replace(
                node,
                rank=new[node.rank],
                reads=tuple(new[read] for read in node.reads),
                holds=tuple(s for s in node.holds if s != weight),
                makes=tuple(s for s in node.makes if s != weight),
            )
        mine: dict[int, int] = {}

        def read(rank: int) -> int:
            if rank in self._inputs and self._of_input[rank]:
                fetch = self._read_fetch(rank, node.rank)
                mine.setdefault(fetch.storage, fetch.block)
                return rank_of_fetch[fetch]
            for weight, block in blocks[rank].items() if rank < len(blocks) else ():
                mine.setdefault(weight, block)
            return new[rank]

        reads = tuple(read(rank) for rank in node.reads)
        remat_reads = [tuple(read(rank) for rank in remat.reads) for remat in node.remats]

        def held(storages: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(mine[s] if s in self._chosen else s for s in storages)

        blocks.append({s: mine[s] for s in node.holds if s in self._chosen})
        return replace(
            node,
            rank=new[node.rank],
            reads=reads,
            holds=held(node.holds),
            eager_reads=tuple(new[rank] for rank in node.eager_reads),
            remats=tuple(
                replace(remat, reads=some, holds=held(remat.holds))
                for remat, some in zip(node.remats, remat_reads, strict=True)
            ),
        )

    def _read_fetch(self, placeholder: int, reader: int) -> _WeightFetch:
        """The last fetch of a weight before a reader."""
        mine = self._of_input[placeholder]
        return mine[bisect_right(mine, reader, key=lambda fetch: fetch.first) - 1]


class _Gaps:
    """How long the ops between two uses of a weight take, or the reads of other weights used there."""

    def __init__(self, step: Step, first_uses: Sequence[tuple[int, int]]) -> None:
        self._step = step
        self._until = [0.0, *accumulate(node.seconds for node in step.nodes)]
        self._firsts = sorted((rank, storage) for storage, rank in first_uses)
        self._reads = [0.0, *accumulate(self.read_seconds(storage) for _, storage in self._firsts)]

    def read_seconds(self, storage: int) -> float:
        speed, nbytes = self._step.transfer_speed, self._step.storages[storage].nbytes
        return float(nbytes) if speed is None else speed.read_seconds(nbytes)

    def between(self, one: int, other: int) -> float:
        """The seconds after the op `one` and before the op `other`, as long as transfers never stop."""
        first = bisect_left(self._firsts, (one + 1, -1))
        last = bisect_left(self._firsts, (other, -1))
        return max(self._until[other] - self._until[one + 1], self._reads[last] - self._reads[first])


def _cluster_starts(
    uses: Sequence[int], spans: Sequence[tuple[int, int]], gaps: _Gaps, storage: int
) -> list[int]:
    """The first use of each cluster of uses of a weight."""
    starts = list(uses[:1])
    for one, other in pairwise(uses):
        is_crossed = any(first <= one and other <= last for first, last in spans)
        if not is_crossed and gaps.between(one, other) >= gaps.read_seconds(storage):
            starts.append(other)
    return starts
