"""Activations: the forward storages that backward reads again, with the attributes of μ-TWO.

An activation is a storage, not a node: a node and its views are one activation.
Shortcoming: the recompute fields of an activation assume that all other activations are retained.
"""

from dataclasses import dataclass
from itertools import accumulate

from lowtide.facts import Activation, Node, Region, Step

NANOSECOND = 1e-9
"""The shortest recompute: views take no time, and JSON has no infinite ratio."""


@dataclass(frozen=True, slots=True)
class Uses:
    """The ranks that make and read one storage; `holder` is the node that names it."""

    storage: int
    maker: int
    holder: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]


def storage_uses(step: Step) -> dict[int, Uses]:
    """Uses of each storage that forward makes and backward reads through a forward value; no static ones."""
    nodes, storages = step.nodes, step.storages
    readers: list[list[int]] = [[] for _ in nodes]
    always = [node for node in nodes if not node.on_demand]
    for node in always:
        for read in dict.fromkeys(node.reads):
            readers[read].append(node.rank)
    maker: dict[int, int] = {}
    holders: dict[int, list[int]] = {}
    for node in always:
        if node.region is Region.FORWARD:
            for storage in node.makes:
                if not storages[storage].static:
                    maker.setdefault(storage, node.rank)
        for storage in node.holds:
            if storage in maker:
                holders.setdefault(storage, []).append(node.rank)
    found: dict[int, Uses] = {}
    for storage, made_by in maker.items():
        mine = holders.get(storage, [])
        if not any(
            nodes[holder].region is Region.FORWARD and nodes[reader].region is not Region.FORWARD
            for holder in mine
            for reader in readers[holder]
        ):
            continue
        ranks = sorted({reader for holder in mine for reader in readers[holder]})
        found[storage] = Uses(
            storage=storage,
            maker=made_by,
            holder=_holder(step, storage, made_by, mine),
            forward=tuple(r for r in ranks if nodes[r].region is Region.FORWARD) or (made_by,),
            backward=tuple(r for r in ranks if nodes[r].region is not Region.FORWARD),
        )
    return found


def _holder(step: Step, storage: int, maker: int, holders: list[int]) -> int:
    """The maker, or the getitem that picks `storage` where the maker makes several."""
    if len(step.nodes[maker].makes) > 1:
        for rank in holders:
            node = step.nodes[rank]
            if maker in node.reads and node.holds == (storage,):
                return rank
    return maker


def recompute_ranks(step: Step, storage: int, holder: int, kept: set[int]) -> tuple[list[int], list[int]]:
    """The ranks to recompute for `storage` where only `kept` storages are retained, and the ranks these read.

    A value without a remat ends the walk as a kept value does.
    """
    storages = step.storages
    again: set[int] = set()
    sources: set[int] = set()
    stack = [holder]
    while stack:
        rank = stack.pop()
        if rank in again:
            continue
        again.add(rank)
        remat = step.nodes[rank].recompute
        assert remat is not None
        for read in remat.reads:
            read_storages = [s for s in step.nodes[read].holds if not storages[s].static]
            is_kept = all(s in kept and s != storage for s in read_storages)
            if is_kept or step.nodes[read].recompute is None:
                sources.add(read)
            else:
                stack.append(read)
    return sorted(again), sorted(sources - again)


def activations(step: Step, known: dict[int, Uses] | None = None) -> tuple[Activation, ...]:
    """All activations of `step` in the order of their makers; `known`: its `storage_uses`, where known."""
    found = storage_uses(step) if known is None else known
    uses = sorted(found.values(), key=lambda u: (u.maker, u.holder, u.storage))
    names = _names(step, uses)
    saved = {u.storage for u in uses}
    until = [0.0, *accumulate(node.seconds for node in step.nodes)]
    return tuple(_activation(step, u, names, saved, until) for u in uses)


def _names(step: Step, uses: list[Uses]) -> dict[int, str]:
    names: dict[int, str] = {}
    taken: set[str] = set()
    for use in uses:
        name = step.nodes[use.holder].name
        if name in taken:
            name = f"{name}.{step.nodes[use.maker].makes.index(use.storage)}"
        taken.add(name)
        names[use.storage] = name
    return names


def why_fixed(step: Step, use: Uses) -> str:
    """Why no remat can recompute this activation; '' where one can."""
    if step.storages[use.storage].pinned:
        return "the caller holds it to the end of the step"
    for node in (step.nodes[use.holder], step.nodes[use.maker]):
        if node.recompute is None:
            return node.fixed or "it has no remat"
    return ""


def _activation(
    step: Step, use: Uses, names: dict[int, str], saved: set[int], until: list[float]
) -> Activation:
    node = step.nodes[use.holder]
    nbytes = step.storages[use.storage].nbytes
    idle = max(0.0, until[use.backward[0]] - until[use.forward[-1] + 1])
    fixed = why_fixed(step, use)
    again: list[int] = []
    sources: list[int] = []
    if not fixed:
        again, sources = recompute_ranks(step, use.storage, use.holder, saved)
    seconds = sum(remat.seconds for r in again if (remat := step.nodes[r].recompute) is not None)
    return Activation(
        name=names[use.storage],
        storage=use.storage,
        module=node.module or step.nodes[use.maker].module,
        source=node.source or step.nodes[use.maker].source,
        nbytes=nbytes,
        creation_rank=use.maker,
        last_forward_use=use.forward[-1],
        first_backward_use=use.backward[0],
        last_backward_use=use.backward[-1],
        inactive_seconds=idle,
        offload_seconds=_offload_seconds(step, nbytes),
        recompute_sources=_source_names(step.nodes, sources, names),
        recompute_nodes=tuple(step.nodes[r].name for r in again),
        recompute_seconds=seconds,
        recompute_bytes=_recompute_peak_bytes(step, again),
        recompute_ratio=0.0 if fixed else nbytes / max(seconds, NANOSECOND),
        fixed=fixed,
    )


def _offload_seconds(step: Step, nbytes: int) -> float:
    """The seconds of one transfer; of a copy on the device where the step has no store."""
    if step.transfer_speed is not None:
        return step.transfer_speed.read_seconds(nbytes)
    return nbytes / step.copy_bytes_per_second if step.copy_bytes_per_second else 0.0


def _source_names(nodes: tuple[Node, ...], sources: list[int], names: dict[int, str]) -> tuple[str, ...]:
    """The names of the activations that the sources read; of the nodes where a source reads none."""
    found: dict[str, None] = {}
    for rank in sources:
        mine = [names[s] for s in nodes[rank].holds if s in names]
        found.update(dict.fromkeys(mine or [nodes[rank].name]))
    return tuple(found)


def _recompute_peak_bytes(step: Step, again: list[int]) -> int:
    """The peak of the live bytes that the runs of `again` make, workspaces included."""
    last_read: dict[int, int] = {}
    for position, rank in enumerate(again):
        remat = step.nodes[rank].recompute
        assert remat is not None
        for read in remat.reads:
            for storage in step.nodes[read].holds:
                last_read[storage] = position
    live = most = 0
    made: dict[int, int] = {}
    for position, rank in enumerate(again):
        remat = step.nodes[rank].recompute
        assert remat is not None
        for storage in remat.makes:
            if storage not in made and not step.storages[storage].static:
                made[storage] = step.storages[storage].nbytes
                live += made[storage]
        most = max(most, live + remat.workspace_bytes)
        for storage in [s for s in made if last_read.get(s, -1) <= position and made[s]]:
            if position != len(again) - 1:
                live -= made[storage]
                made[storage] = 0
    return most
