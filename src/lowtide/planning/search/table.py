"""A step as plain lists and tuples, the form that the planners' inner loops need."""

from dataclasses import dataclass, field

from lowtide.facts import Node, Recipe, Region, Step
from lowtide.planning.activations import Uses, storage_uses
from lowtide.planning.simulate import recompute_slots, tuple_of


@dataclass(frozen=True, slots=True)
class Op:
    """One way to run node `rank`: first, or by `method`. `shared` pairs a storage with the reads that may
    hand it on."""

    rank: int
    reads: tuple[int, ...]
    fresh: tuple[tuple[int, int, bool], ...]
    """(storage, nbytes, pinned) of the blocks it makes"""
    shared: tuple[tuple[int, tuple[int, ...]], ...]
    workspace_bytes: int
    seconds: float
    method: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """`plain[r]` says how rank `r` runs first; `recipes` are all ways to bring values back, numbered in the
    order of ranks, and `again[r]` the numbers of those of rank `r`, the preferred one first.

    Runs that bring a value back before backward node `t` stand in its *slot*; a run's key is
    `t * width + place[n]` for recipe `n`, and the plain run of `t` itself comes last with
    `t * width + width - 1`. `place` sorts recipes so that each comes after those of what it reads.
    """

    step: Step
    size: int
    width: int
    plain: tuple[Op, ...]
    recipes: tuple[Op, ...]
    again: tuple[tuple[int, ...], ...]
    recompute: tuple[int | None, ...]
    """by rank, the number of the preferred recipe that computes the value again"""
    place: tuple[int, ...]
    recipe_at: tuple[int, ...]
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
    """forward ranks that can be computed again, each after all recipes that read it"""
    choices: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """by storage, the recipes that make it besides the preferred one of their rank"""
    on_demand: frozenset[int] = frozenset()
    """ranks that run only where a recipe reads them"""
    parts: frozenset[int] = frozenset()
    """numbers of recipes that only take a part of a tuple"""
    tuple_keys: frozenset[int] = frozenset()
    """keys of the first runs of those tuples"""

    def key(self, slot: int, recipe: int) -> int:
        return slot * self.width + self.place[recipe]

    def last_key(self, slot: int) -> int:
        """Key of the plain run of `slot`."""
        return slot * self.width + self.width - 1

    def rank(self, key: int) -> int:
        return self.op(key).rank

    def recipe(self, key: int) -> int:
        """Number of the recipe that a run which is not a first one goes by."""
        return self.recipe_at[key % self.width]

    def op(self, key: int) -> Op:
        slot, place = divmod(key, self.width)
        return self.plain[slot] if place == self.width - 1 else self.recipes[self.recipe_at[place]]

    def may_run(self, rank: int, slot: int) -> bool:
        """Whether the value of forward node `rank` may be brought back right before node `slot`."""
        return bool(self.again[rank]) and self.segment[rank] == self.slot_segment[slot]

    def may_recompute(self, rank: int, slot: int) -> bool:
        """Whether it may be computed again there."""
        return self.recompute[rank] is not None and self.segment[rank] == self.slot_segment[slot]


def make_table(step: Step) -> Table:
    nodes, storages = step.nodes, step.storages
    found: list[Op] = []
    again: list[tuple[int, ...]] = []
    recompute: list[int | None] = []
    parts: dict[int, int] = {}
    choices: dict[int, tuple[int, ...]] = {}
    for node in nodes:
        mine = node.recipes if node.region is Region.FORWARD else ()
        again.append(tuple(range(len(found), len(found) + len(mine))))
        recompute.append(next((n for n, r in zip(again[-1], mine, strict=True) if r is node.recompute), None))
        for recipe in mine:
            whole = tuple_of(step, recipe)
            if whole is not None:
                parts[len(found)] = whole
            if recipe is not mine[0]:
                for storage in recipe.makes:
                    choices[storage] = (*choices.get(storage, ()), len(found))
            found.append(_op(step, node.rank, recipe))
    width = len(found) + 1
    order = _topological(step)
    recipe_at = tuple(number for rank in order for number in again[rank])
    place = [0] * len(found)
    for where, number in enumerate(recipe_at):
        place[number] = where
    slot_segment = recompute_slots(step)
    need = [len(nodes)] * len(nodes)
    for node in reversed(nodes):
        for read in node.reads:
            if recompute[read] is not None and nodes[read].segment == slot_segment[node.rank]:
                need[read] = node.rank
    return Table(
        step=step,
        size=len(nodes),
        width=width,
        plain=tuple(_op(step, node.rank, node) for node in nodes),
        recipes=tuple(found),
        again=tuple(again),
        recompute=tuple(recompute),
        place=tuple(place),
        recipe_at=recipe_at,
        segment=tuple(node.segment for node in nodes),
        slot_segment=slot_segment,
        static_bytes=step.static_bytes,
        first_backward=step.first_backward_rank,
        uses=storage_uses(step),
        own=tuple(
            tuple(s for s in node.holds if not storages[s].static and not storages[s].pinned)
            for node in nodes
        ),
        first_need=tuple(need),
        readers_first=tuple(rank for rank in reversed(order) if recompute[rank] is not None),
        choices=choices,
        on_demand=frozenset(node.rank for node in nodes if node.on_demand),
        parts=frozenset(parts),
        tuple_keys=frozenset(whole * width + width - 1 for whole in parts.values()),
    )


def _op(step: Step, rank: int, source: Node | Recipe) -> Op:
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
        method="" if isinstance(source, Node) else source.method,
    )


def _topological(step: Step) -> list[int]:
    """Ranks so that each comes after all that its recipes read; ties by rank, so most keep their order."""
    done: set[int] = set()
    order: list[int] = []
    for node in step.nodes:
        stack = [node.rank]
        opened: set[int] = set()
        while stack:
            rank = stack[-1]
            recipes = step.nodes[rank].recipes
            open_reads = [read for recipe in recipes for read in recipe.reads if read not in done]
            if rank not in done and open_reads:
                if rank in opened:
                    raise ValueError(f"the recipe of '{step.nodes[rank].name}' reads itself")
                opened.add(rank)
                stack.extend(reversed(open_reads))
                continue
            stack.pop()
            if rank not in done:
                done.add(rank)
                order.append(rank)
    return order
