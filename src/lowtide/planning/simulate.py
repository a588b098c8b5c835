"""Simulate a schedule: the live bytes during every run, by kind, the peak and the seconds.

- A run makes fresh blocks, has its workspace while it runs, and afterwards frees every value that no later
  run reads. A block is live while a live value refers to it.
- Static blocks are always live. A pinned block is live from the run that makes it to the end of the step.
- A run reads the latest earlier run of each node.
- A remat run makes a second block. A node on demand runs only where a remat reads it.
- A backward node that runs by a rule replaces the chain of ops that leads to it alone.
- An offloaded value is live until the run that frees it, and again from the run that fetches it. Its
  transfers take time alone (`transfer_model`). A weight that rests on the store is live from each of its
  fetches, the first of which may run before its rank.
- A rematerialized part of a forward tuple is the part's first value: it keeps only that part live.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np
from numpy.typing import NDArray

from lowtide.facts import FETCH, Kind, Node, Region, Remat, Run, Step
from lowtide.planning.transfer_model import Traffic, simulate_transfers

Bytes = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """The live bytes during each run of a schedule; position `i` is that of `runs[i]`.

    `bytes_by_kind` adds up to `live_bytes`; workspace inside ops counts as `Kind.OTHER`.
    `last_read[i]` is the position of the last run that reads the value made at `i` (`i` if none).
    `blocks` are all blocks of memory: the storage, and the positions between which the block is live.
    `added_seconds` are the `seconds` beyond those of the baseline, stalls of the `traffic` with a store
    included.
    """

    runs: tuple[Run, ...]
    live_bytes: Bytes
    bytes_by_kind: dict[Kind, Bytes]
    last_read: tuple[int, ...]
    peak_bytes: int
    peak_position: int
    peak_rank: int
    peak_node: str
    seconds: float
    added_seconds: float
    blocks: tuple[tuple[int, int, int], ...] = ()
    workspace_bytes: tuple[int, ...] = ()
    traffic: Traffic | None = None

    @property
    def stall_seconds(self) -> float:
        """Waiting for transfers."""
        return 0.0 if self.traffic is None else self.traffic.stall_seconds

    @property
    def order(self) -> tuple[int, ...]:
        """The rank of every run."""
        return tuple(run.rank for run in self.runs)


def baseline_runs(step: Step) -> tuple[Run, ...]:
    """The baseline: every node once, without nodes on demand."""
    return tuple(Run(node.rank) for node in step.nodes if not node.on_demand)


def eager_runs(step: Step) -> tuple[Run, ...]:
    """The step in the order in which eager PyTorch runs it."""
    nodes = [node for node in step.nodes if not node.on_demand]
    places = [i for i, node in enumerate(nodes) if node.eager_place]
    # segments by the start of their backward pass: eager has the same order of segments
    start: dict[int, int] = {}
    for i in places:
        start.setdefault(nodes[i].segment, i)
    moved = sorted((start[nodes[i].segment], nodes[i].eager_place, nodes[i].rank) for i in places)
    ranks = [node.rank for node in nodes]
    for i, (_, _, rank) in zip(places, moved, strict=True):
        ranks[i] = rank
    return tuple(map(Run, ranks))


def source_of(step: Step, run: Run) -> Node | Remat:
    """The node of a first run, or the remat of any other run: its reads, makes and costs."""
    return step.nodes[run.rank] if run.is_first else remat_of(step, run)


def remat_of(step: Step, run: Run) -> Remat:
    """The remat of a run; ValueError where its node has none by that rule."""
    node = step.nodes[run.rank]
    remat = node.remat(run.rule)
    if remat is None:
        why = node.fixed or f"it has no remat '{run.rule}'"
        raise ValueError(f"'{node.name}' cannot be rematerialized: {why}")
    return remat


def is_remat(step: Step, run: Run) -> bool:
    """Whether a run rematerializes a value. A backward node that runs by a rule runs for the first time."""
    return not run.is_first and step.nodes[run.rank].region is Region.FORWARD


def replaced_ranks(step: Step, run: Run) -> tuple[int, ...]:
    """The other backward ranks that a run by a rule replaces: the chain between the run and its reads."""
    remat = step.nodes[run.rank].remat(run.rule)
    if remat is None or is_remat(step, run):
        return ()
    reads = set(remat.reads)
    found: set[int] = set()
    waiting = [read for read in step.nodes[run.rank].reads if read not in reads]
    while waiting:
        rank = waiting.pop()
        if rank not in found and step.nodes[rank].region is Region.BACKWARD:
            found.add(rank)
            waiting += [read for read in step.nodes[rank].reads if read not in reads]
    return tuple(sorted(found))


def extra_seconds(step: Step, run: Run) -> float:
    """The seconds of a backward run by a rule, beyond those of the ops that it replaces."""
    plain = [-step.nodes[rank].seconds for rank in (run.rank, *replaced_ranks(step, run))]
    return fsum([remat_of(step, run).seconds, *plain])


def _added_seconds(step: Step, run: Run) -> float:
    """The seconds of a run that the baseline does not take."""
    if is_remat(step, run) or step.nodes[run.rank].on_demand:
        return source_of(step, run).seconds
    return 0.0 if run.is_first else extra_seconds(step, run)


def recompute_slots(step: Step) -> tuple[int, ...]:
    """For each rank, the segment whose forward nodes may be rematerialized right before it; -1 for none.

    Only backward nodes qualify, after all inputs of their segment's backward pass.
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


def tuple_of(step: Step, remat: Remat) -> int | None:
    """The rank of the tuple of which a remat takes a part; None for any other remat."""
    if remat.makes or len(remat.reads) != 1:
        return None
    whole = remat.reads[0]
    return whole if set(remat.holds) < set(step.nodes[whole].holds) else None


def check_runs(step: Step, runs: Sequence[Run]) -> None:
    """Raise ValueError when `runs` are not a schedule of `step`."""
    nodes = step.nodes
    slots = recompute_slots(step)
    seen: set[int] = set()
    waiting: list[Node] = []
    due = 0
    before: Node | None = None
    needless = {node.rank for node in nodes if node.on_demand}
    known = [run for run in runs if run.rule and 0 <= run.rank < len(nodes)]
    needless.update(rank for run in known for rank in replaced_ranks(step, run))
    for position, run in enumerate(runs):
        rank = run.rank
        try:
            _check_run(step, run, seen)
            if is_remat(step, run):
                waiting.append(nodes[rank])
                continue
            if nodes[rank].movable:
                _check_movable(nodes, rank, due, before, seen)
            elif nodes[rank].op == FETCH and rank != due:
                _check_fetch(nodes, rank, due, before, seen)
                needless.add(rank)
                seen.add(rank)
                continue
            elif rank != due:
                _check_first(rank, due, needless)
            if waiting:
                _check_slot(waiting, nodes[rank], slots[rank])
                waiting.clear()
        except ValueError as error:
            raise ValueError(f"position {position}: {error}") from None
        seen.add(rank)
        if not nodes[rank].movable:
            due, before = rank + 1, nodes[rank]
    if waiting:
        raise ValueError(f"'{waiting[0].name}' is rematerialized after the last node of the step")
    for node in nodes[due:]:
        if node.rank not in needless:
            raise ValueError(f"'{node.name}' never runs")


def _check_run(step: Step, run: Run, seen: set[int]) -> None:
    rank, rule = run
    if not 0 <= rank < len(step.nodes):
        raise ValueError(f"there is no rank {rank}")
    node = step.nodes[rank]
    if rule and node.region is not Region.FORWARD and (rank in seen or not node.remats):
        raise ValueError(f"'{node.name}' is not a forward node, yet rematerialized")
    if is_remat(step, run) and rank not in seen:
        raise ValueError(f"'{node.name}' is rematerialized before it has run")
    reads = source_of(step, run).reads if rule else node.reads
    if not seen.issuperset(reads):
        missing = next(read for read in reads if read not in seen)
        raise ValueError(f"'{node.name}' reads '{step.nodes[missing].name}', which has not run")


def _check_first(rank: int, due: int, needless: Container[int]) -> None:
    """First runs are in the order of ranks; only needless runs may be missing."""
    left_out = [other for other in range(due, rank) if other not in needless]
    if rank < due or left_out:
        wanted = left_out[0] if left_out else due
        raise ValueError(f"first run of rank {rank}, where that of {wanted} is due")


def _check_movable(
    nodes: Sequence[Node], rank: int, due: int, before: Node | None, seen: Container[int]
) -> None:
    """A movable node runs once, not before its rank, and inside the forward part of its segment."""
    node = nodes[rank]
    if rank in seen:
        raise ValueError(f"'{node.name}' runs twice")
    if any(not other.on_demand and other.rank not in seen for other in nodes[due:rank]):
        raise ValueError(f"'{node.name}' runs before its rank {rank}")
    if before is None or (before.segment, before.region) != (node.segment, node.region):
        raise ValueError(f"'{node.name}' runs outside the forward part of its segment {node.segment}")
    if before.op == "output":
        raise ValueError(f"'{node.name}' runs after the forward part of its segment {node.segment}")


def _check_fetch(
    nodes: Sequence[Node], rank: int, due: int, before: Node | None, seen: Container[int]
) -> None:
    """A resting weight is fetched once, at its rank or earlier, inside the forward part of its segment."""
    node = nodes[rank]
    if rank in seen:
        raise ValueError(f"'{node.name}' runs twice")
    if rank < due:
        raise ValueError(f"'{node.name}' runs after its rank {rank}")
    if before is None or (before.segment, before.region) != (node.segment, node.region):
        raise ValueError(f"'{node.name}' runs outside the forward part of its segment {node.segment}")


def _check_slot(waiting: Sequence[Node], before: Node, slot: int) -> None:
    for node in waiting:
        if slot != node.segment:
            raise ValueError(
                f"'{node.name}' is rematerialized before '{before.name}', outside the backward part of its "
                f"segment {node.segment}"
            )


def simulate(step: Step, runs: Sequence[Run]) -> Timeline:
    """Walk `runs` and count. ValueError when they are not a schedule of `step`."""
    check_runs(step, runs)
    return simulate_unchecked(step, runs)


def simulate_unchecked(step: Step, runs: Sequence[Run]) -> Timeline:
    """The same for runs in any valid order, such as eager's."""
    nodes, storages = step.nodes, step.storages
    static = [storage.static for storage in storages]
    num_runs = len(runs)
    latest = [-1] * len(nodes)
    first_value = [False] * len(nodes)
    last_read = list(range(num_runs))
    blocks_of: list[dict[int, int]] = []
    block_storage: list[int] = []
    block_start: list[int] = []
    block_pinned: list[bool] = []
    workspace: list[int] = []
    seconds: list[float] = []
    added_seconds: list[float] = []
    for position, run in enumerate(runs):
        rank, rule = run
        node = nodes[rank]
        source = source_of(step, run) if rule else node
        again = is_remat(step, run)
        first_value[rank] = not again
        whole = tuple_of(step, source) if isinstance(source, Remat) else None
        if whole is None or not first_value[whole]:
            for read in source.reads:
                last_read[latest[read]] = position
        mine: dict[int, int] = {}
        for storage in source.makes:
            if not static[storage]:
                mine[storage] = len(block_storage)
                block_storage.append(storage)
                block_start.append(position)
                block_pinned.append(not again and storages[storage].pinned)
        for storage in source.holds:
            if not static[storage] and storage not in mine:
                mine[storage] = _shared_block(
                    step, node, storage, [blocks_of[latest[read]] for read in source.reads]
                )
        blocks_of.append(mine)
        latest[rank] = position
        workspace.append(source.workspace_bytes)
        seconds.append(source.seconds)
        added_seconds.append(_added_seconds(step, run))

    block_end = list(block_start)
    for position, mine in enumerate(blocks_of):
        until = last_read[position]
        for block in mine.values():
            block_end[block] = max(block_end[block], until)
    for block, pinned in enumerate(block_pinned):
        if pinned:
            block_end[block] = num_runs - 1

    traffic = None if step.transfer_speed is None else simulate_transfers(step, runs, step.transfer_speed)
    stalls = [] if traffic is None else [transfer.added_seconds for transfer in traffic.transfers]
    bytes_by_kind = _count(step, block_storage, block_start, block_end, num_runs)
    bytes_by_kind[Kind.OTHER] = bytes_by_kind[Kind.OTHER] + np.array(workspace, dtype=np.int64)
    live_bytes = sum(bytes_by_kind.values(), start=np.zeros(num_runs, dtype=np.int64))
    peak = int(live_bytes.argmax()) if num_runs else 0
    return Timeline(
        runs=tuple(runs),
        live_bytes=live_bytes,
        bytes_by_kind=bytes_by_kind,
        last_read=tuple(last_read),
        peak_bytes=int(live_bytes[peak]) if num_runs else 0,
        peak_position=peak,
        peak_rank=runs[peak].rank if num_runs else 0,
        peak_node=nodes[runs[peak].rank].name if num_runs else "",
        # fsum: the sum does not depend on the order of the runs
        seconds=fsum([*seconds, *stalls]),
        added_seconds=fsum([*added_seconds, *stalls]),
        blocks=tuple(zip(block_storage, block_start, block_end, strict=True)),
        workspace_bytes=tuple(workspace),
        traffic=traffic,
    )


def _shared_block(step: Step, node: Node, storage: int, sources: Iterable[dict[int, int]]) -> int:
    """The block of `storage` that `node` shares with the first of its reads that has one."""
    for blocks in sources:
        if storage in blocks:
            return blocks[storage]
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
