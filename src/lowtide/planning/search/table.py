"""A step as plain lists and tuples, the form that the planners' inner loops need."""

from dataclasses import dataclass

from lowtide.facts import Node, Recipe, Region, Step
from lowtide.planning.activations import Uses, storage_uses
from lowtide.planning.simulate import recompute_slots, tuple_of


@dataclass(frozen=True, slots=True)
class Op:
    """One way to run a node. `shared` pairs a storage with the reads that may hand it on."""

    reads: tuple[int, ...]
    fresh: tuple[tuple[int, int, bool], ...]
    """(storage, nbytes, pinned) of the blocks it makes"""
    shared: tuple[tuple[int, tuple[int, ...]], ...]
    workspace_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Table:
    """`plain[r]` and `again[r]` say how rank `r` runs first and later; `again` is None for never.

    Recompute runs before backward node `t` stand in its *slot*; a run's key is
    `t * width + place[r]`, the plain run of `t` itself comes last with `t * width + width - 1`.
    `place` sorts ranks so that every recipe comes after what it reads.
    """

    step: Step
    size: int
    width: int
    plain: tuple[Op, ...]
    again: tuple[Op | None, ...]
    place: tuple[int, ...]
    rank_at: tuple[int, ...]
    segment: tuple[int, ...]
    slot_segment: tuple[int, ...]
    static_bytes: int
    first_backward: int
    uses: dict[int, Uses]
    """by storage, of the activations"""
    own: tuple[tuple[int, ...], ...]
    """storages that each rank holds and that can be dropped: neither static nor pinned"""
    first_need: tuple[int, ...]
    """the first slot that reads each rank and where it may run again; `size` when there is none"""
    readers_first: tuple[int, ...]
    """forward ranks, each after all recipes that read it"""
    parts: frozenset[int] = frozenset()
    """ranks that only take a part of a tuple when they run again"""
    tuple_keys: frozenset[int] = frozenset()
    """keys of the first runs of those tuples"""

    def key(self, slot: int, rank: int) -> int:
        return slot * self.width + self.place[rank]

    def last_key(self, slot: int) -> int:
        """Key of the plain run of `slot`."""
        return slot * self.width + self.width - 1

    def rank(self, key: int) -> int:
        slot, place = divmod(key, self.width)
        return slot if place == self.width - 1 else self.rank_at[place]

    def op(self, key: int) -> Op:
        slot, place = divmod(key, self.width)
        if place == self.width - 1:
            return self.plain[slot]
        op = self.again[self.rank_at[place]]
        assert op is not None
        return op

    def may_run(self, rank: int, slot: int) -> bool:
        """Whether forward node `rank` may run again right before node `slot`."""
        return self.again[rank] is not None and self.segment[rank] == self.slot_segment[slot]


def make_table(step: Step) -> Table:
    place = _places(step)
    rank_at = [0] * len(place)
    for rank, where in enumerate(place):
        rank_at[where] = rank
    again = tuple(
        _op(step, node.recipe, first=False)
        if node.recipe is not None and node.region is Region.FORWARD
        else None
        for node in step.nodes
    )
    slot_segment = recompute_slots(step)
    need = [len(step.nodes)] * len(step.nodes)
    for node in reversed(step.nodes):
        for read in node.reads:
            if again[read] is not None and step.nodes[read].segment == slot_segment[node.rank]:
                need[read] = node.rank
    storages = step.storages
    tuples = {node.rank: whole for node in step.nodes if (whole := tuple_of(step, node)) is not None}
    return Table(
        step=step,
        size=len(step.nodes),
        width=len(step.nodes) + 1,
        plain=tuple(_op(step, node, first=True) for node in step.nodes),
        again=again,
        place=tuple(place),
        rank_at=tuple(rank_at),
        segment=tuple(node.segment for node in step.nodes),
        slot_segment=slot_segment,
        static_bytes=step.static_bytes,
        first_backward=step.first_backward_rank,
        uses=storage_uses(step),
        own=tuple(
            tuple(s for s in node.holds if not storages[s].static and not storages[s].pinned)
            for node in step.nodes
        ),
        first_need=tuple(need),
        readers_first=tuple(sorted(range(step.first_backward_rank), key=lambda rank: -place[rank])),
        parts=frozenset(tuples),
        tuple_keys=frozenset(whole * (len(step.nodes) + 1) + len(step.nodes) for whole in tuples.values()),
    )


def _op(step: Step, source: Node | Recipe, *, first: bool) -> Op:
    storages = step.storages
    reads = tuple(dict.fromkeys(source.reads))
    makes = [storages[s] for s in source.makes if not storages[s].static]
    shared = [s for s in source.holds if not storages[s].static and s not in source.makes]
    return Op(
        reads=reads,
        fresh=tuple((s.id, s.nbytes, s.pinned and first) for s in makes),
        shared=tuple((s, tuple(u for u in reads if s in step.nodes[u].holds)) for s in shared),
        workspace_bytes=source.workspace_bytes,
        seconds=source.seconds,
    )


def _places(step: Step) -> list[int]:
    """Topological places by recipe; the rank breaks ties, so most nodes keep their order."""
    place = [-1] * len(step.nodes)
    count = 0
    for node in step.nodes:
        stack = [node.rank]
        opened: set[int] = set()
        while stack:
            rank = stack[-1]
            recipe = step.nodes[rank].recipe
            open_reads = [r for r in (recipe.reads if recipe else ()) if place[r] < 0]
            if place[rank] < 0 and open_reads:
                if rank in opened:
                    raise ValueError(f"the recipe of '{step.nodes[rank].name}' reads itself")
                opened.add(rank)
                stack.extend(reversed(open_reads))
                continue
            stack.pop()
            if place[rank] < 0:
                place[rank] = count
                count += 1
    return place
