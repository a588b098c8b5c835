"""Simulate a schedule: the bytes held during every run, by kind, and the peak.

The model: a run makes fresh blocks, holds its workspace while it runs, and gives back after it
every value whose last read it was. A block is freed when no live value holds it. Static blocks are
always there; a pinned one stays from the run that first makes it to the end of the step. A run
reads the latest earlier run of each rank it needs; a rank that comes again is run by its recipe.
A part taken again from a tuple that stands since the forward pass is the part's first value: it
holds that part and not the rest of the tuple.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np
from numpy.typing import NDArray

from lowtide.facts import Kind, Node, Recipe, Region, Step

Bytes = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """Bytes held during each run of a schedule; position `i` is the run of rank `order[i]`.

    `bytes_by_kind` adds up to `bytes_held`; workspace inside ops counts as `Kind.OTHER`.
    `last_read[i]` is the position of the last run that reads the value made at `i` (`i` if none).
    """

    order: tuple[int, ...]
    bytes_held: Bytes
    bytes_by_kind: dict[Kind, Bytes]
    last_read: tuple[int, ...]
    peak_bytes: int
    peak_position: int
    peak_rank: int
    peak_node: str
    seconds: float
    recompute_seconds: float


def plain_order(step: Step) -> tuple[int, ...]:
    """The step as it runs without any plan."""
    return tuple(range(len(step.nodes)))


def recompute_slots(step: Step) -> tuple[int, ...]:
    """For every rank, the segment whose forward nodes may run again right before it; -1 for none.

    Only backward nodes qualify, and only from where all inputs of their segment's backward stand.
    """
    last_input: dict[int, int] = {}
    for node in step.nodes:
        if node.region is Region.BACKWARD and node.op == "placeholder":
            last_input[node.segment] = node.rank
    return tuple(
        node.segment
        if node.region is Region.BACKWARD and node.rank > last_input.get(node.segment, -1)
        else -1
        for node in step.nodes
    )


def tuple_of(step: Step, node: Node) -> int | None:
    """The rank whose value `node` only takes a part of when it runs again; None for any other node."""
    recipe = node.recipe
    if recipe is None or recipe.makes or len(recipe.reads) != 1:
        return None
    whole = recipe.reads[0]
    return whole if set(recipe.holds) < set(step.nodes[whole].holds) else None


def check_order(step: Step, order: Sequence[int]) -> None:
    """Raise ValueError when `order` is not a schedule of `step`."""
    nodes = step.nodes
    slots = recompute_slots(step)
    seen = [False] * len(nodes)
    waiting: list[Node] = []
    next_plain = 0
    for position, rank in enumerate(order):
        if not 0 <= rank < len(nodes):
            raise ValueError(f"position {position}: there is no rank {rank}")
        node = nodes[rank]
        source: Node | Recipe = node
        if seen[rank]:
            source = _recipe(node, position)
            waiting.append(node)
        elif rank != next_plain:
            raise ValueError(f"position {position}: first run of rank {rank} before that of {next_plain}")
        for read in source.reads:
            if not seen[read]:
                raise ValueError(
                    f"position {position}: '{node.name}' reads '{nodes[read].name}', which has not run"
                )
        if not seen[rank]:
            seen[rank] = True
            next_plain += 1
            for late in waiting:
                if slots[rank] != late.segment:
                    raise ValueError(
                        f"position {position}: '{late.name}' runs again before '{node.name}', outside the "
                        f"backward part of its segment {late.segment}"
                    )
            waiting.clear()
    if waiting:
        raise ValueError(f"'{waiting[0].name}' runs again after the last node of the step")
    if next_plain != len(nodes):
        raise ValueError(f"'{nodes[next_plain].name}' never runs")


def _recipe(node: Node, position: int) -> Recipe:
    if node.recipe is None:
        why = node.fixed or "it has no recipe"
        raise ValueError(f"position {position}: '{node.name}' cannot be run again: {why}")
    if node.region is not Region.FORWARD:
        raise ValueError(f"position {position}: '{node.name}' is not a forward node, yet runs again")
    return node.recipe


def simulate(step: Step, order: Sequence[int]) -> Timeline:
    """Walk `order` and count. ValueError when `order` is not a schedule of `step`."""
    check_order(step, order)
    nodes, storages = step.nodes, step.storages
    static = [storage.static for storage in storages]
    num_runs = len(order)
    latest = [-1] * len(nodes)
    first_value = [False] * len(nodes)
    last_read = list(range(num_runs))
    held: list[dict[int, int]] = []
    block_storage: list[int] = []
    block_start: list[int] = []
    block_pinned: list[bool] = []
    workspace = np.zeros(num_runs, dtype=np.int64)
    seconds: list[float] = []
    again_seconds: list[float] = []
    for position, rank in enumerate(order):
        node = nodes[rank]
        again = latest[rank] >= 0
        source: Node | Recipe = node.recipe if again and node.recipe is not None else node
        first_value[rank] = not again
        if not (again and (whole := tuple_of(step, node)) is not None and first_value[whole]):
            for read in source.reads:
                last_read[latest[read]] = position
        mine: dict[int, int] = {}
        for storage in source.makes:
            if not static[storage]:
                mine[storage] = len(block_storage)
                block_storage.append(storage)
                block_start.append(position)
                block_pinned.append(storages[storage].pinned and not again)
        for storage in source.holds:
            if not static[storage] and storage not in mine:
                mine[storage] = _shared_block(
                    step, node, storage, (held[latest[read]] for read in source.reads)
                )
        held.append(mine)
        latest[rank] = position
        workspace[position] = source.workspace_bytes
        seconds.append(source.seconds)
        if again:
            again_seconds.append(source.seconds)

    block_end = list(block_start)
    for position, mine in enumerate(held):
        until = last_read[position]
        for block in mine.values():
            block_end[block] = max(block_end[block], until)
    for block, pinned in enumerate(block_pinned):
        if pinned:
            block_end[block] = num_runs - 1

    bytes_by_kind = _count(step, block_storage, block_start, block_end, num_runs)
    bytes_by_kind[Kind.OTHER] = bytes_by_kind[Kind.OTHER] + workspace
    bytes_held = sum(bytes_by_kind.values(), start=np.zeros(num_runs, dtype=np.int64))
    peak = int(bytes_held.argmax()) if num_runs else 0
    return Timeline(
        order=tuple(order),
        bytes_held=bytes_held,
        bytes_by_kind=bytes_by_kind,
        last_read=tuple(last_read),
        peak_bytes=int(bytes_held[peak]) if num_runs else 0,
        peak_position=peak,
        peak_rank=order[peak] if num_runs else 0,
        peak_node=nodes[order[peak]].name if num_runs else "",
        # fsum: the same runs cost the same in whatever order they stand.
        seconds=fsum(seconds),
        recompute_seconds=fsum(again_seconds),
    )


def _shared_block(step: Step, node: Node, storage: int, sources: Iterable[dict[int, int]]) -> int:
    """The block of `storage` that `node` shares with the first of what it reads that has it."""
    for held in sources:
        if storage in held:
            return held[storage]
    raise ValueError(
        f"'{node.name}' holds storage {storage} ('{step.storages[storage].name}'), "
        "which it neither makes nor finds in what it reads"
    )


def _count(
    step: Step, block_storage: list[int], block_start: list[int], block_end: list[int], num_runs: int
) -> dict[Kind, Bytes]:
    kinds = list(Kind)
    index = {kind: i for i, kind in enumerate(kinds)}
    storage_kind = np.array([index[storage.kind] for storage in step.storages], dtype=np.int64)
    storage_bytes = np.array([storage.nbytes for storage in step.storages], dtype=np.int64)
    change = np.zeros((len(kinds), num_runs + 1), dtype=np.int64)
    blocks = np.array(block_storage, dtype=np.int64)
    if len(blocks):
        np.add.at(change, (storage_kind[blocks], np.array(block_start)), storage_bytes[blocks])
        np.add.at(change, (storage_kind[blocks], np.array(block_end) + 1), -storage_bytes[blocks])
    for storage in step.storages:
        if storage.static:
            change[index[storage.kind], 0] += storage.nbytes
    live = change.cumsum(axis=1)[:, :num_runs]
    return {kind: live[i] for i, kind in enumerate(kinds)}
