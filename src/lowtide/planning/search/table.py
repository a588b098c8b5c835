"""A step as plain tuples for the inner loops of planners: ops, sets of remats, storages behind values.

A schedule is a set of remats, each before a backward node (its *slot*). Every such set is a valid schedule: a
run reads the latest earlier run of each node that it needs, and a node on demand runs where a remat reads it.

A value refers to storages; a view or a part of a tuple makes no storage. So a reader of a value needs a
block of each of its storages, made by a first run or by a remat, and after a remat the views on the way
once more. Bounds and annealing choose blocks, and the views follow (`StorageValues`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lowtide.facts import Node, Region, Remat, Run, Step
from lowtide.planning.activations import Uses, storage_uses
from lowtide.planning.simulate import recompute_slots, tuple_of

Rerun = tuple[int, int]
"""(slot, number of a remat)"""

RematSet = frozenset[Rerun]
"""All remats of a schedule, each with the backward node before which it runs."""


@dataclass(frozen=True, slots=True)
class Op:
    """One way to run node `rank`: its first run, or a remat by `rule`.

    `shared` pairs each storage that it does not make with the reads that may hand it on.
    """

    rank: int
    reads: tuple[int, ...]
    fresh: tuple[tuple[int, int, bool], ...]
    """(storage, nbytes, pinned) of the blocks it makes"""
    shared: tuple[tuple[int, tuple[int, ...]], ...]
    workspace_bytes: int
    seconds: float
    rule: str = ""


class Table:
    """The ops of a step by rank and by number.

    `plain[r]` is the first run of rank `r`. `remats` are all remats, numbered in the order of ranks;
    `again[r]` are the numbers of those of rank `r`, the preferred one first.

    A remat before backward node `t` stands in *slot* `t`. A run's key is `t * width + place[n]` for remat
    `n`; the first run of `t` is the last of its slot and has `t * width + width - 1`. `place` sorts remats
    so that each comes after the remats of its reads; `remat_at` is its inverse.
    """

    def __init__(self, step: Step) -> None:
        nodes, storages = step.nodes, step.storages
        self.step, self.size = step, len(nodes)
        self.static_bytes, self.first_backward = step.static_bytes, step.first_backward_rank
        self.segment, self.slot_segment = [node.segment for node in nodes], recompute_slots(step)
        self.plain = [_op(step, node.rank, node) for node in nodes]
        numbered = [(node, remat) for node in nodes if node.region is Region.FORWARD for remat in node.remats]
        self.remats = [_op(step, node.rank, remat) for node, remat in numbered]
        self.width = len(self.remats) + 1
        self.again: list[list[int]] = [[] for _ in nodes]
        self.recompute: list[int | None] = [None] * self.size
        """by rank, the number of the preferred remat that computes the value again"""
        for number, (node, remat) in enumerate(numbered):
            self.again[node.rank].append(number)
            if remat is node.recompute and self.recompute[node.rank] is None:
                self.recompute[node.rank] = number
        order = _topological(step)
        self.remat_at = [number for rank in order for number in self.again[rank]]
        self.place = [0] * len(self.remats)
        for where, number in enumerate(self.remat_at):
            self.place[number] = where
        self.readers_first = [rank for rank in reversed(order) if self.recompute[rank] is not None]
        """forward ranks that can be recomputed, each after all ranks whose remats read it"""
        self.first_need = [self.size] * self.size
        """by rank, the first slot that reads it and where it may be recomputed; `size` where there is none"""
        for node in reversed(nodes):
            for read in node.reads:
                if self.may_recompute(read, node.rank):
                    self.first_need[read] = node.rank
        self.uses: dict[int, Uses] = storage_uses(step)
        """by storage, of the activations"""
        droppable = [not storage.static and not storage.pinned for storage in storages]
        self.own = [[s for s in node.holds if droppable[s]] for node in nodes]
        """by rank, the storages of its value that can be dropped: neither static nor pinned"""
        self.on_demand = frozenset(node.rank for node in nodes if node.on_demand)
        """ranks that run only where a remat reads them"""
        wholes = {number: tuple_of(step, remat) for number, (_, remat) in enumerate(numbered)}
        self.parts = frozenset(number for number, whole in wholes.items() if whole is not None)
        """numbers of remats that only take a part of a tuple"""
        self.tuple_keys = frozenset(self.last_key(whole) for whole in wholes.values() if whole is not None)
        """keys of the first runs of those tuples"""

    def key(self, slot: int, remat: int) -> int:
        return slot * self.width + self.place[remat]

    def last_key(self, slot: int) -> int:
        """Key of the plain run of `slot`."""
        return slot * self.width + self.width - 1

    def rank(self, key: int) -> int:
        return self.op(key).rank

    def remat(self, key: int) -> int:
        """Number of the remat of a run that is not a first one."""
        return self.remat_at[key % self.width]

    def op(self, key: int) -> Op:
        slot, place = divmod(key, self.width)
        return self.plain[slot] if place == self.width - 1 else self.remats[self.remat_at[place]]

    def may_run(self, rank: int, slot: int) -> bool:
        """Whether forward node `rank` may be rematerialized in `slot`."""
        return bool(self.again[rank]) and self.segment[rank] == self.slot_segment[slot]

    def may_recompute(self, rank: int, slot: int) -> bool:
        """Whether it may be recomputed there."""
        return self.recompute[rank] is not None and self.segment[rank] == self.slot_segment[slot]


def _op(step: Step, rank: int, source: Node | Remat) -> Op:
    storages = step.storages
    is_first = isinstance(source, Node)
    reads = tuple(dict.fromkeys(source.reads))
    makes = [storages[s] for s in source.makes if not storages[s].static]
    shared = [s for s in source.holds if not storages[s].static and s not in source.makes]
    return Op(
        rank=rank,
        reads=reads,
        fresh=tuple((s.id, s.nbytes, s.pinned and is_first) for s in makes),
        shared=tuple((s, tuple(u for u in reads if s in step.nodes[u].holds)) for s in shared),
        workspace_bytes=source.workspace_bytes,
        seconds=source.seconds,
        rule="" if isinstance(source, Node) else source.rule,
    )


def _topological(step: Step) -> list[int]:
    """Ranks so that each comes after all that its remats read; ties by rank, so most keep their order."""
    done: set[int] = set()
    order: list[int] = []
    for node in step.nodes:
        stack = [node.rank]
        opened: set[int] = set()
        while stack:
            rank = stack[-1]
            remats = step.nodes[rank].remats
            open_reads = [read for remat in remats for read in remat.reads if read not in done]
            if rank not in done and open_reads:
                if rank in opened:
                    raise ValueError(f"the remat of '{step.nodes[rank].name}' reads itself")
                opened.add(rank)
                stack.extend(reversed(open_reads))
                continue
            stack.pop()
            if rank not in done:
                done.add(rank)
                order.append(rank)
    return order


def schedule_of(table: Table, remats: Iterable[Rerun]) -> tuple[Run, ...]:
    """All runs of the step in their order, with these remats."""
    by_slot: dict[int, list[int]] = {}
    for slot, remat in remats:
        by_slot.setdefault(slot, []).append(remat)
    absent = table.on_demand - demanded(table, remats)
    order: list[Run] = []
    for slot in range(table.size):
        for remat in sorted(by_slot.get(slot, ()), key=table.place.__getitem__):
            order.append(Run(table.remats[remat].rank, table.remats[remat].rule))
        if slot not in absent:
            order.append(Run(slot))
    return tuple(order)


def demanded(table: Table, remats: Iterable[Rerun]) -> set[int]:
    """Ranks on demand that these remats read."""
    if not table.on_demand:
        return set()
    return {read for _, remat in remats for read in table.remats[remat].reads if read in table.on_demand}


def remats_in(table: Table, runs: Sequence[Run]) -> RematSet:
    """The remats of a schedule, each before the next first run. KeyError where the step has no such remat."""
    numbers = {(op.rank, op.rule): number for number, op in enumerate(table.remats)}
    found: set[Rerun] = set()
    slot = table.size
    for run in reversed(runs):
        if run.is_first:
            slot = run.rank
        else:
            found.add((slot, numbers[run.rank, run.rule]))
    return frozenset(found)


@dataclass(frozen=True)
class StorageValues:
    """Which storages the values of a step refer to; static storages are left out."""

    table: Table

    @cached_property
    def is_dynamic(self) -> list[bool]:
        return [not storage.static for storage in self.table.step.storages]

    @cached_property
    def required(self) -> list[frozenset[int]]:
        """By rank, the storages to which its value refers after each of its runs."""
        found = []
        for node in self.table.step.nodes:
            common = set(node.holds).intersection(*(remat.holds for remat in node.remats))
            found.append(frozenset(s for s in common if self.is_dynamic[s]))
        return found

    @cached_property
    def view_remat(self) -> list[int | None]:
        """By rank, the remat that makes no storage, if there is one."""
        remats = self.table.remats
        return [next((n for n in mine if not remats[n].fresh), None) for mine in self.table.again]

    def is_view(self, rank: int) -> bool:
        """Whether every remat of a rank refers to storages of other ranks only."""
        mine = self.table.again[rank]
        return bool(mine) and not any(self.table.remats[n].fresh for n in mine)

    def sources(self, rank: int) -> frozenset[int]:
        """The forward ranks whose values a backward rank refers to; a forward rank itself."""
        if rank not in self._sources:
            first_backward, plain = self.table.first_backward, self.table.plain

            def shared(backward: int) -> list[int]:
                return [u for _, providers in plain[backward].shared for u in providers[:1]]

            found = _reachable(rank, lambda r: [] if r < first_backward else shared(r), self._sources)
            self._sources[rank] = frozenset(r for r in found if r < first_backward)
        return self._sources[rank]

    @cached_property
    def _sources(self) -> dict[int, frozenset[int]]:
        return {}

    def way_back(self, rank: int) -> frozenset[int]:
        """A rank and the ranks from which its value can be taken again, view by view."""
        if rank not in self._ways_back:
            self._ways_back[rank] = _reachable(rank, self._viewed, self._ways_back)
        return self._ways_back[rank]

    def _viewed(self, rank: int) -> list[int]:
        """The ranks whose values a view refers to."""
        remat, mine = self.view_remat[rank], self.required[rank]
        reads = () if remat is None else self.table.remats[remat].reads
        return [read for read in reads if not mine.isdisjoint(self.required[read])]

    @cached_property
    def _ways_back(self) -> dict[int, frozenset[int]]:
        return {}

    @cached_property
    def readers(self) -> dict[int, set[int]]:
        """By storage, the forward ranks through which backward or a remat reads it."""
        table = self.table
        found: dict[int, set[int]] = {}
        read = {u for op in table.plain[table.first_backward :] for u in op.reads}
        read |= {u for op in table.remats if op.fresh for u in op.reads}
        for rank in read:
            for source in self.sources(rank):
                for storage in self.required[source]:
                    found.setdefault(storage, set()).add(source)
        return found

    def remats_of(self, storage: int) -> list[int]:
        """Remats that make a storage anew for any of its readers."""
        return sorted(frozenset().union(*(self._serving(r, storage) for r in self.readers.get(storage, ()))))

    def _serving(self, reader: int, storage: int) -> frozenset[int]:
        """Remats that make a storage anew for one of its readers."""
        back = self.way_back(reader)
        return frozenset(n for rank in back for n in self.table.again[rank] if self._makes(n, storage))

    def classes(self, storage: int) -> list[tuple[frozenset[int], frozenset[int]]]:
        """The readers of a storage that the same remats serve, each with those remats."""
        found: dict[frozenset[int], set[int]] = {}
        for reader in sorted(self.readers.get(storage, ())):
            found.setdefault(self._serving(reader, storage), set()).add(reader)
        return [(frozenset(readers), remats) for remats, readers in found.items()]

    def _makes(self, remat: int, storage: int) -> bool:
        return any(made == storage for made, _, _ in self.table.remats[remat].fresh)

    def views(self, rank: int) -> list[int]:
        """Of the ranks behind a value, those that can be taken again without making a storage."""
        back = (r for source in self.sources(rank) for r in self.way_back(source))
        return sorted(r for r in back if self.view_remat[r] is not None)

    def view_seconds(self, rank: int) -> float:
        remat = self.view_remat[rank]
        assert remat is not None
        return self.table.remats[remat].seconds


def _reachable(
    start: int, following: Callable[[int], list[int]], known: Mapping[int, frozenset[int]]
) -> frozenset[int]:
    """`start` and all ranks that lead on from it; `known` has those of some ranks. Chains can be long."""
    found, todo = {start}, [start]
    while todo:
        for rank in following(todo.pop()):
            if rank in known:
                found |= known[rank]
            elif rank not in found:
                found.add(rank)
                todo.append(rank)
    return frozenset(found)
