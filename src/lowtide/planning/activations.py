"""Activations: the forward storages that backward reads again, with the attributes of μ-TWO.

An activation is a storage, not a node: views and getitems of it are the same activation.
Shortcoming: the recompute fields describe one activation dropped alone, all others retained.
"""

from dataclasses import dataclass
from itertools import accumulate

from lowtide.facts import Activation, Node, Region, Step

NANOSECOND = 1e-9
"""Ops that cost nothing at all (views) would have an infinite ratio, which no file format likes."""


@dataclass(frozen=True, slots=True)
class Uses:
    """Where one storage is made and read; `holder` is the node that names it."""

    storage: int
    maker: int
    holder: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]


def storage_uses(step: Step) -> dict[int, Uses]:
    """Uses of every forward-made, non-static storage held by a forward value that backward reads."""
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
    """The maker itself, or the getitem that picks `storage` out of the several that it makes."""
    if len(step.nodes[maker].makes) > 1:
        for rank in holders:
            node = step.nodes[rank]
            if maker in node.reads and node.holds == (storage,):
                return rank
    return maker


def recompute_ranks(step: Step, storage: int, holder: int, kept: set[int]) -> tuple[list[int], list[int]]:
    """Ranks to run again for `storage`, and the ranks that those read, when only `kept` storages stay.

    Values without a remat end the walk like kept ones: they would have to stay.
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
            held = [s for s in step.nodes[read].holds if not storages[s].static]
            stays = all(s in kept and s != storage for s in held)
            if stays or step.nodes[read].recompute is None:
                sources.add(read)
            else:
                stack.append(read)
    return sorted(again), sorted(sources - again)


def activations(step: Step, known: dict[int, Uses] | None = None) -> tuple[Activation, ...]:
    """All activations of `step`, in the order they are made; `known` are its `storage_uses`, if they are."""
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
    """Why this activation can never be recomputed, or '' when it can."""
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
        recompute_bytes=_bytes_on_the_way(step, again),
        recompute_ratio=0.0 if fixed else nbytes / max(seconds, NANOSECOND),
        fixed=fixed,
    )


def _offload_seconds(step: Step, nbytes: int) -> float:
    """One way over the link, or by a plain copy where there is none."""
    if step.transfer_speed is not None:
        return step.transfer_speed.read_seconds(nbytes)
    return nbytes / step.copy_bytes_per_second if step.copy_bytes_per_second else 0.0


def _source_names(nodes: tuple[Node, ...], sources: list[int], names: dict[int, str]) -> tuple[str, ...]:
    """A source that holds activations goes by their names, so that views of one are the same source."""
    found: dict[str, None] = {}
    for rank in sources:
        mine = [names[s] for s in nodes[rank].holds if s in names]
        found.update(dict.fromkeys(mine or [nodes[rank].name]))
    return tuple(found)


def _bytes_on_the_way(step: Step, again: list[int]) -> int:
    """The most that the runs of `again` hold at once, their sources not counted."""
    last_holder: dict[int, int] = {}
    for position, rank in enumerate(again):
        remat = step.nodes[rank].recompute
        assert remat is not None
        for read in remat.reads:
            for storage in step.nodes[read].holds:
                last_holder[storage] = position
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
        for storage in [s for s in made if last_holder.get(s, -1) <= position and made[s]]:
            if position != len(again) - 1:
                live -= made[storage]
                made[storage] = 0
    return most
